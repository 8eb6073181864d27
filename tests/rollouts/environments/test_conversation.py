"""What was sampled stays, and only what the template writes is added: on hand-made templates and on those of the families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surogate_rl.rollouts.conversation import Conversation, Dialect, Said, TemplateRefuses, end_of_turn
from surogate_rl.rollouts.types import Completion, Message, Segment

Family = Callable[[str], Any]

CHAT = [{"role": "user", "content": "hi"}]
BYE: list[Message] = [{"role": "user", "content": "bye"}]
ALL = ["qwen2_5", "qwen3", "llama3_1", "smollm2", "mistral", "terse", "plain_text"]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def rendered(tokenizer: Any, messages: Sequence[Message], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options))


def start(tokenizer: Any, messages: Sequence[Message] | None = CHAT, text: str = "", tools: Any = None) -> Conversation:
    prompt = ids_of(tokenizer, rendered(tokenizer, messages, tools=tools) if messages is not None else text)
    return Conversation(lambda: Dialect(tokenizer), messages, text, prompt, tools)


def say(conversation: Conversation, tokenizer: Any, ids: list[int], turn: int = 0) -> Said:
    """The policy samples `ids`."""
    ended = bool(ids) and ids[-1] == tokenizer.eos_token_id
    said = Said(
        tokenizer.decode(ids, skip_special_tokens=True),
        tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False),
        tokenizer.decode(ids[-1:]) if ended else None,
    )
    conversation.say(Completion(ids, [-0.1 * (i + 1) for i in range(len(ids))], "stop", [3] * len(ids)), said, turn)
    return said


def sampled(segments: Sequence[Segment]) -> list[int]:
    return [token for s in segments for token, mine in zip(s.tokens, s.sampled, strict=True) if mine]


def squashed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("name", ALL)
def test_the_next_prompt_is_the_sampled_ids_and_the_templates_delta(family: Family, name: str) -> None:
    tokenizer = family(name)
    conversation = start(tokenizer)
    prompt = conversation.context
    turn = [*ids_of(tokenizer, "five"), tokenizer.eos_token_id]
    say(conversation, tokenizer, turn)
    conversation.answer(None, BYE)
    whole = rendered(tokenizer, [*CHAT, {"role": "assistant", "content": "five"}, *BYE])
    if name == "plain_text":  # its template writes no token that ends a turn: history is not what was sampled
        assert conversation.context == ids_of(tokenizer, whole)
        return
    assert conversation.context[: len(prompt) + len(turn)] == [*prompt, *turn]
    assert tokenizer.decode(conversation.context) == (whole if name != "mistral" else whole.replace("[/INST] five", "[/INST]five"))
    say(conversation, tokenizer, [*ids_of(tokenizer, "no"), tokenizer.eos_token_id], turn=1)
    (segment,) = conversation.segments
    assert sampled([segment]) == [*turn, *ids_of(tokenizer, "no"), tokenizer.eos_token_id]
    assert [t for t in segment.turns if t >= 0] == [0] * len(turn) + [1] * 2
    assert all((turn < 0) == (not mine) for turn, mine in zip(segment.turns, segment.sampled, strict=True))
    assert all((v, p) == (-1, 0.0) for v, p, mine in zip(segment.versions, segment.logps, segment.sampled, strict=True) if not mine)


def test_the_hand_worked_case(family: Family) -> None:
    """hi / <think>x</think>A / bye: the thinking is dropped from history, so that a new segment begins; without thinking the delta is the
    ids of <|user|>bye<|end|><|assistant|>."""
    tokenizer = family("terse")
    plain = start(tokenizer)
    say(plain, tokenizer, [*ids_of(tokenizer, "A"), tokenizer.eos_token_id])
    before = len(plain.segments[0].tokens)
    plain.answer(None, BYE)
    assert plain.context[before:] == ids_of(tokenizer, "<|user|>bye<|end|><|assistant|>")

    thinking = start(tokenizer)
    first = [*ids_of(tokenizer, "<think>x</think>A"), tokenizer.eos_token_id]
    say(thinking, tokenizer, first)
    thinking.answer(None, BYE)
    assert thinking.context == ids_of(tokenizer, "<|user|>hi<|end|><|assistant|>A<|end|><|user|>bye<|end|><|assistant|>")
    say(thinking, tokenizer, ids_of(tokenizer, "yes"), turn=1)
    prompts = [segment.tokens[: segment.prompt_length] for segment in thinking.segments]
    assert [tokenizer.decode(prompt) for prompt in prompts] == [
        "<|user|>hi<|end|><|assistant|>",
        "<|user|>hi<|end|><|assistant|>A<|end|><|user|>bye<|end|><|assistant|>",
    ]
    assert sampled(thinking.segments) == [*first, *ids_of(tokenizer, "yes")]


def test_ids_that_the_tokenizer_would_not_have_chosen_stay(family: Family) -> None:
    tokenizer = family("terse")
    letters = [i for letter in "five" for i in ids_of(tokenizer, letter)]
    assert letters != ids_of(tokenizer, "five"), "the case must really be spelled otherwise"
    conversation = start(tokenizer)
    say(conversation, tokenizer, [*letters, tokenizer.eos_token_id])
    conversation.answer(None, BYE)
    assert conversation.context == [
        *ids_of(tokenizer, "<|user|>hi<|end|><|assistant|>"),
        *letters,
        *ids_of(tokenizer, "<|end|><|user|>bye<|end|><|assistant|>"),
    ]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "smollm2", "terse"])
def test_a_turn_that_a_limit_has_cut_gets_the_end_that_it_lacks(family: Family, name: str) -> None:
    tokenizer = family(name)
    conversation = start(tokenizer)
    cut = ids_of(tokenizer, "The answer")
    say(conversation, tokenizer, cut)
    conversation.answer(None, BYE)
    assert tokenizer.decode(conversation.context) == rendered(tokenizer, [*CHAT, {"role": "assistant", "content": "The answer"}, *BYE])
    assert conversation.context[len(conversation.segments[0].tokens)] == tokenizer.eos_token_id
    assert conversation.segments[0].tokens[-len(cut) :] == cut


def test_qwen3_keeps_thinking_between_tools_and_drops_it_when_the_user_speaks(family: Family) -> None:
    tokenizer = family("qwen3")
    conversation = start(tokenizer)
    thought = [*ids_of(tokenizer, "<think>\nadd them\n</think>\n\nlet me see"), tokenizer.eos_token_id]
    say(conversation, tokenizer, thought)
    conversation.answer(None, [{"role": "tool", "content": "42"}])
    assert len(conversation.segments) == 1
    say(conversation, tokenizer, [*ids_of(tokenizer, "<think>\nso\n</think>\n\n42"), tokenizer.eos_token_id], turn=1)
    assert len(conversation.segments) == 1
    conversation.answer(None, BYE)
    say(conversation, tokenizer, [*ids_of(tokenizer, "<think>\n\n</think>\n\nbye"), tokenizer.eos_token_id], turn=2)
    assert len(conversation.segments) == 2
    text = tokenizer.decode(conversation.segments[1].tokens[: conversation.segments[1].prompt_length])
    assert "add them" not in text
    assert "let me see" in text


def test_an_empty_thought_that_the_prompt_supplies_is_not_trained(family: Family) -> None:
    """With thinking switched off Qwen3's prompt ends with an empty block, which history does not show: each turn is its own segment."""
    tokenizer = family("qwen3")
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{%- set enable_thinking = false %}" + template
        conversation = start(tokenizer)
        assert tokenizer.decode(conversation.context).endswith("<think>\n\n</think>\n\n")
        say(conversation, tokenizer, [*ids_of(tokenizer, "one"), tokenizer.eos_token_id])
        conversation.answer(None, BYE)
        say(conversation, tokenizer, [*ids_of(tokenizer, "two"), tokenizer.eos_token_id], turn=1)
    finally:
        tokenizer.chat_template = template
    assert len(conversation.segments) == 2
    assert tokenizer.decode(sampled(conversation.segments)) == "one<|im_end|>two<|im_end|>"
    prompt = tokenizer.decode(conversation.segments[1].tokens[: conversation.segments[1].prompt_length])
    assert prompt.count("<think>") == 1


def test_a_turn_ended_by_another_token_than_the_templates_is_rendered_anew(family: Family) -> None:
    tokenizer = family("llama3_1")
    conversation = start(tokenizer)
    ended = tokenizer.convert_tokens_to_ids("<|eom_id|>")
    ids = [*ids_of(tokenizer, "one"), ended]
    conversation.say(Completion(ids, [0.0] * len(ids), "stop", [0] * len(ids)), Said("one", "one", "<|eom_id|>"), 0)
    conversation.answer(None, BYE)
    assert conversation.context == ids_of(tokenizer, rendered(tokenizer, [*CHAT, {"role": "assistant", "content": "one"}, *BYE]))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "mistral"])
def test_calls_and_results_are_written_as_the_family_writes_them(family: Family, name: str) -> None:
    """The model writes the very text that its template would: one segment, and the whole is the template's rendering."""
    tokenizer = family(name)
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    calls = [{"type": "function", "id": "000000000", "function": function}]
    parts: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    result: Message = {"role": "tool", "name": "add", "tool_call_id": "000000000", "content": "3"}
    written = {
        "qwen2_5": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        "qwen3": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        "llama3_1": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
        "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "000000000"}]',
    }[name]
    schema = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}}
    conversation = start(tokenizer, tools=[schema])
    turn = [*ids_of(tokenizer, written), tokenizer.eos_token_id]
    say(conversation, tokenizer, turn)
    conversation.answer(parts, [result])
    whole = rendered(tokenizer, [*CHAT, parts, result], tools=[schema])
    assert tokenizer.decode(conversation.context) == whole
    say(conversation, tokenizer, [*ids_of(tokenizer, "3"), tokenizer.eos_token_id], turn=1)
    (segment,) = conversation.segments
    assert sampled([segment])[: len(turn)] == turn
    assert conversation.messages[1] == parts


def test_a_call_spelled_otherwise_than_the_template_would_stays_as_it_was_said(family: Family) -> None:
    tokenizer = family("qwen2_5")
    parts: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "000000000", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    written = '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>'
    conversation = start(tokenizer)
    say(conversation, tokenizer, [*ids_of(tokenizer, written), tokenizer.eos_token_id])
    conversation.answer(parts, [{"role": "tool", "content": "1"}])
    say(conversation, tokenizer, ids_of(tokenizer, "1"), turn=1)
    assert len(conversation.segments) == 1
    assert written in tokenizer.decode(conversation.segments[0].tokens)
    assert "<tool_response>\n1\n</tool_response>" in tokenizer.decode(conversation.segments[0].tokens)


def test_a_template_that_refuses_the_turns_says_why(family: Family) -> None:
    tokenizer = family("mistral")
    conversation = start(tokenizer)
    say(conversation, tokenizer, [*ids_of(tokenizer, "one"), tokenizer.eos_token_id])
    with pytest.raises(TemplateRefuses, match="unknown role"):
        conversation.answer(None, [{"role": "system", "content": "be good"}])


@pytest.mark.parametrize("name", ["qwen2_5", "plain_text"])
def test_text_that_the_tokenizer_refuses_costs_the_episode(family: Family, name: str) -> None:
    """Environments' words are made encodable before they come here; a template may still write what is not."""
    tokenizer = family(name)
    odd: list[Message] = [{"role": "user", "content": "\ud83d"}]
    messages = None if name == "plain_text" else CHAT
    for act in (lambda conversation: conversation.begin(odd), lambda conversation: conversation.answer(None, odd)):
        conversation = start(tokenizer, messages, "guess: ")
        say(conversation, tokenizer, [*ids_of(tokenizer, "one"), tokenizer.eos_token_id])
        with pytest.raises(TemplateRefuses, match="the tokenizer refuses the text: "):
            act(conversation)


def test_plain_text_is_continued_by_the_encoded_answer(family: Family) -> None:
    tokenizer = family("plain_text")
    conversation = start(tokenizer, None, "guess: ")
    say(conversation, tokenizer, ids_of(tokenizer, "5"))
    conversation.answer(None, [{"role": "user", "content": "\nhigher\n"}])
    assert tokenizer.decode(conversation.context) == "guess: 5\nhigher\n"
    assert conversation.context[: len(conversation.segments[0].tokens)] == conversation.segments[0].tokens
    assert conversation.messages == [
        {"role": "user", "content": "guess: "},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "\nhigher\n"},
    ]


def test_what_the_environment_says_first_is_in_the_prompt(family: Family) -> None:
    tokenizer = family("qwen2_5")
    conversation = start(tokenizer)
    conversation.begin(BYE)
    assert conversation.context == ids_of(tokenizer, rendered(tokenizer, [*CHAT, *BYE]))
    say(conversation, tokenizer, [*ids_of(tokenizer, "one"), tokenizer.eos_token_id])
    conversation.answer(None, CHAT)
    whole = rendered(tokenizer, [*CHAT, *BYE, {"role": "assistant", "content": "one"}, *CHAT])
    assert tokenizer.decode(conversation.context) == whole


@pytest.mark.parametrize(
    ("said", "whole", "expected"),
    [
        (Said("a b", "a b", "#"), ">a b#next", 5),
        (Said("a b", " a  b ", "#"), ">a b\n#next", 6),  # white space that a template trims or adds is no other history
        (Said("a b", "a b", None), ">a b#next", 4),
        (Said("", "", "#"), ">#next", 2),
        (Said("a b", "a b", "#"), ">a c#next", None),
        (Said("a b", "a b", "#"), ">a b!next", None),
        (Said("a b", "a b", "#"), "<a b#next", None),
        (Said("ab", "ab", "#"), ">a", None),
    ],
)
def test_where_the_unseen_begins(said: Said, whole: str, expected: int | None) -> None:
    assert end_of_turn(">", said, whole) == expected


# ---- any ids, any words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_sampled_and_said_segments_hold_the_sampled_ids_and_the_templates_words(
    family: Family, name: str, data: st.DataObject
) -> None:
    tokenizer = family(name)
    eos = tokenizer.eos_token_id
    other = st.integers(0, len(tokenizer) - 1).filter(lambda i: i != eos)
    words = st.text(st.characters(codec="utf-8", exclude_characters="<>[]|"), max_size=12)
    conversation = start(tokenizer)
    emitted: list[int] = []
    contexts: list[list[int]] = []
    histories: list[list[Message]] = []
    history: list[Message] = list(CHAT)
    for turn in range(data.draw(st.integers(1, 4))):
        contexts.append(conversation.context)
        histories.append(list(history))
        ids = data.draw(st.lists(other, min_size=1, max_size=12))
        if data.draw(st.booleans()):
            ids.append(eos)
        said = say(conversation, tokenizer, ids, turn)
        emitted += ids
        reply = {"role": "user", "content": data.draw(words)}
        conversation.answer(None, [reply])
        history += [{"role": "assistant", "content": said.raw}, reply]
    assert sampled(conversation.segments) == emitted
    assert [t for s in conversation.segments for t in s.turns if t >= 0] == sorted(
        t for s in conversation.segments for t in s.turns if t >= 0
    )
    # every turn was sampled from exactly the ids that its segment holds before it, and these are the template's words and earlier samples
    given_before = []
    for segment in conversation.segments:
        turns = sorted({t for t in segment.turns if t >= 0})
        for turn in turns:
            first = segment.turns.index(turn)
            given_before.append(segment.tokens[:first])
    assert given_before == contexts
    for context, messages in zip(contexts, histories, strict=True):
        text = rendered(tokenizer, messages)
        if "<think>" in text or "�" in text or "�" in tokenizer.decode(context):
            continue  # dropped thinking, or half a character: words do not tell
        assert squashed(tokenizer.decode(context)) == squashed(text)


# ---- plain text --------------------------------------------------------------------------------------------------------------------


def metaspace() -> Any:
    """As Llama 2's: words carry the space before them, and the first word of any text gets one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "</s>"], show_progress=False)
    core.train_from_iterator(["guess a number higher lower than five and ten", "0 1 2 3 4 5 6 7 8 9\n"] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


def test_a_tokenizer_that_puts_a_space_before_texts_puts_none_into_the_middle() -> None:
    tokenizer = metaspace()
    conversation = start(tokenizer, None, "guess a number ")
    say(conversation, tokenizer, ids_of(tokenizer, "five"))
    conversation.answer(None, [{"role": "user", "content": "lower than ten"}])
    added = conversation.context[len(conversation.segments[0].tokens) :]
    assert "".join(tokenizer.convert_ids_to_tokens(added)) == "lower▁than▁ten"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_plain_text_holds_the_sampled_ids_and_the_environments_words(family: Family, data: st.DataObject) -> None:
    tokenizer = family("plain_text")
    words = st.text(st.characters(codec="utf-8", exclude_characters="<>|"), max_size=12)
    prompt = data.draw(words.filter(bool))
    conversation = start(tokenizer, None, prompt)
    emitted: list[int] = []
    spelled = prompt
    for turn in range(data.draw(st.integers(1, 4))):
        ids = ids_of(tokenizer, data.draw(words.filter(bool)))
        say(conversation, tokenizer, ids, turn)
        emitted += ids
        reply = data.draw(words)
        conversation.answer(None, [{"role": "user", "content": reply}])
        spelled += tokenizer.decode(ids) + reply
    assert sampled(conversation.segments) == emitted
    assert len(conversation.segments) == 1
    assert tokenizer.decode(conversation.context) == spelled
