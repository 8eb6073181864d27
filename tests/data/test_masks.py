"""Which tokens of a conversation are trained. The expected ids come from apply_chat_template and from hand-cut texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from surogate_rl.config.schema import DatasetConfig
from surogate_rl.data import DataError, Example, encode_prompt, load_examples, load_pairs
from surogate_rl.rollouts.types import Task

Make = Callable[..., PreTrainedTokenizerFast]
Write = Callable[..., str]
Rows = list[dict[str, Any]]


def chat(*turns: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]}


def load(rows: Rows, tokenizer: PreTrainedTokenizerFast, write: Write, **options: Any) -> list[Example]:
    more = {key: options.pop(key) for key in ("type", "system_prompt") if key in options}
    loaded = load_examples([DatasetConfig(path=write(rows), **more)], tokenizer, sequence_len=options.pop("sequence_len", 512), **options)
    return list(loaded.items)


def said(example: Example, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Texts of the runs of trained tokens."""
    runs: list[list[int]] = []
    before = False
    for token, flag in zip(example.tokens.tolist(), example.mask.tolist(), strict=True):
        if flag:
            if not before:
                runs.append([])
            runs[-1].append(token)
        before = flag
    return [tokenizer.decode(run) for run in runs]


def rendered(tokenizer: PreTrainedTokenizerFast, messages: Rows, **options: Any) -> list[int]:
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert isinstance(ids, list)
    return ids


@pytest.mark.parametrize(
    ("template", "eos", "end"),
    [("chatml", "<|im_end|>", "<|im_end|>"), ("llama3", "<|eos|>", "<|eot|>"), ("chatml_generation", "<|im_end|>", "<|im_end|>")],
)
def test_assistant_turns_with_their_ends_and_nothing_else(
    make_tokenizer: Make, templates: dict[str, str], write_rows: Write, template: str, eos: str, end: str
) -> None:
    tokenizer = make_tokenizer(templates[template], eos=eos, bos=True)
    row = chat("Hello there", "I am fine, thank you!", "What is the sum?", "The answer is five.")
    (example,) = load([row], tokenizer, write_rows)
    assert said(example, tokenizer) == [f"I am fine, thank you!{end}", f"The answer is five.{end}"]
    whole = rendered(tokenizer, row["messages"])
    # what the template writes after the last end of turn is nothing to learn from
    assert example.tokens.tolist() == whole[: len(example)]
    assert not tokenizer.decode(whole[len(example) :]).strip()
    assert example.tokens.dtype == np.int32


def test_prompt_of_every_trained_turn_is_what_an_engine_gets(make_tokenizer: Make, templates: dict[str, str], write_rows: Write) -> None:
    tokenizer = make_tokenizer(templates["chatml"])
    row = chat("hi", "Hello there", "bye", "because")
    (example,) = load([row], tokenizer, write_rows)
    starts = [i for i in range(1, len(example)) if example.mask[i] and not example.mask[i - 1]]
    for start, turn in zip(starts, (1, 3), strict=True):
        task = Task(0, row["messages"][:turn], None, {})
        assert encode_prompt(task, tokenizer) == example.tokens[:start].tolist()
        assert encode_prompt(task, tokenizer) == rendered(tokenizer, row["messages"][:turn], add_generation_prompt=True)


def test_exactly_one_bos(make_tokenizer: Make, templates: dict[str, str], write_rows: Write) -> None:
    tokenizer = make_tokenizer(templates["llama3"], bos=True, eos="<|eos|>")
    bos = tokenizer.bos_token_id
    (example,) = load([chat("hi", "bye")], tokenizer, write_rows)
    assert example.tokens.tolist().count(bos) == 1
    assert example.tokens[0] == bos
    assert encode_prompt(Task(0, [{"role": "user", "content": "hi"}], None, {}), tokenizer).count(bos) == 1
    for text in ("hi", "<|begin|>hi"):
        assert encode_prompt(Task(0, None, text, {}), tokenizer) == [bos, *tokenizer("hi", add_special_tokens=False)["input_ids"]]
        (example,) = load([{"text": text}], tokenizer, write_rows)
        assert example.tokens.tolist().count(bos) == 1
        assert example.tokens[0] == bos
    doubled = make_tokenizer("{{ bos_token }}" + templates["llama3"], bos=True, eos="<|eos|>")
    (example,) = load([chat("hi", "bye")], doubled, write_rows)
    assert example.tokens.tolist().count(bos) == 1


def test_template_without_bos_gets_none_as_in_any_engine(make_tokenizer: Make, templates: dict[str, str]) -> None:
    tokenizer = make_tokenizer(templates["chatml"], bos=True)
    messages = [{"role": "user", "content": "hi"}]
    assert encode_prompt(Task(0, messages, None, {}), tokenizer) == rendered(tokenizer, messages, add_generation_prompt=True)


# ---- thinking -------------------------------------------------------------------------------------------------------------------------


def test_dropped_thinking_splits_the_conversation(make_tokenizer: Make, templates: dict[str, str], write_rows: Write) -> None:
    tokenizer = make_tokenizer(templates["qwen3"])
    row = chat("hi", "<think>\nbecause\n</think>\n\nHello", "bye", "<think>\nyes\n</think>\n\nno")
    first, second = load([row], tokenizer, write_rows)
    assert said(first, tokenizer) == ["<think>\nbecause\n</think>\n\nHello<|im_end|>"]
    assert said(second, tokenizer) == ["<think>\nyes\n</think>\n\nno<|im_end|>"]
    for example, turn in ((first, 1), (second, 3)):
        prompt = rendered(tokenizer, row["messages"][:turn], add_generation_prompt=True)
        assert example.tokens[: len(prompt)].tolist() == prompt
        assert int(np.argmax(example.mask)) == len(prompt)
    assert "because" not in tokenizer.decode(second.tokens)


def test_turns_that_the_template_keeps_stay_one_example(make_tokenizer: Make, templates: dict[str, str], write_rows: Write) -> None:
    tokenizer = make_tokenizer(templates["qwen3"])
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>\nno\n</think>\n\nHello"},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "<think>\nyes\n</think>\n\nfive"},
    ]
    (example,) = load([{"messages": messages}], tokenizer, write_rows)
    assert said(example, tokenizer) == ["<think>\nno\n</think>\n\nHello<|im_end|>", "<think>\nyes\n</think>\n\nfive<|im_end|>"]


def test_empty_thinking_of_the_generation_prompt_is_not_trained(make_tokenizer: Make, templates: dict[str, str], write_rows: Write) -> None:
    tokenizer = make_tokenizer(templates["qwen3"])
    row = chat("hi", "Hello there")
    (example,) = load([row], tokenizer, write_rows)
    assert "<think>\n\n</think>" in tokenizer.decode(example.tokens)
    assert said(example, tokenizer) == ["Hello there<|im_end|>"]
    prompt = rendered(tokenizer, row["messages"][:1], add_generation_prompt=True, enable_thinking=False)
    assert example.tokens[: len(prompt)].tolist() == prompt
    # also where the template has no switch and writes the block by itself
    fixed = make_tokenizer(templates["qwen3"].split("{% if enable_thinking")[0] + "{% endif %}")
    (example,) = load([row], fixed, write_rows)
    assert said(example, fixed) == ["Hello there<|im_end|>"]


def test_thinking_can_be_trained_where_the_prompt_switches_it_off_by_itself(
    make_tokenizer: Make, templates: dict[str, str], write_rows: Write
) -> None:
    off = templates["qwen3"].replace("enable_thinking is defined and enable_thinking is false", "enable_thinking is not defined")
    assert off != templates["qwen3"]
    tokenizer = make_tokenizer(off)
    thought, plain = load([chat("hi", "<think>\nyes\n</think>\n\nHello"), chat("hi", "Hello")], tokenizer, write_rows)
    assert said(thought, tokenizer) == ["<think>\nyes\n</think>\n\nHello<|im_end|>"]
    assert said(plain, tokenizer) == ["Hello<|im_end|>"]


def test_empty_thinking_that_the_prompt_opens_is_not_trained(make_tokenizer: Make, templates: dict[str, str], write_rows: Write) -> None:
    opens = templates["qwen3"].split("{% if enable_thinking")[0] + "{{ '<think>\n' }}{% endif %}"
    tokenizer = make_tokenizer(opens)
    thought, plain = load([chat("hi", "<think>\nyes\n</think>\n\nHello"), chat("hi", "Hello")], tokenizer, write_rows)
    assert said(thought, tokenizer) == ["yes\n</think>\n\nHello<|im_end|>"]
    assert said(plain, tokenizer) == ["Hello<|im_end|>"]


def test_every_turn_is_trained_once(make_tokenizer: Make, templates: dict[str, str], write_rows: Write) -> None:
    tokenizer = make_tokenizer(templates["qwen3"])
    row = chat("hi", "Hello", "what", "<think>\nno\n</think>\n\nBlue", "name", "five")
    config = [DatasetConfig(path=write_rows([row]))]
    loaded = load_examples(config, tokenizer, sequence_len=512)
    texts = [text for example in loaded.items for text in said(example, tokenizer)]
    assert texts == ["Hello<|im_end|>", "<think>\nno\n</think>\n\nBlue<|im_end|>", "five<|im_end|>"]
    report = loaded.report
    assert (report.rows, report.kept, report.split, len(loaded.items)) == (1, 1, 1, 3)
    assert "split" in str(report)


def test_answer_verified_word_for_word_where_the_prompt_opens_a_thought(
    make_tokenizer: Make, templates: dict[str, str], write_rows: Write
) -> None:
    tokenizer = make_tokenizer(templates["opened_thinking"], eos="<|eos|>")
    first, second = load([chat("hi", "Hello", "bye", "no")], tokenizer, write_rows)
    assert said(first, tokenizer) == ["Hello<|eos|>"]
    assert said(second, tokenizer) == ["no<|eos|>"]


def test_template_that_drops_what_it_prompts_for_is_refused(make_tokenizer: Make, templates: dict[str, str], write_rows: Write) -> None:
    tokenizer = make_tokenizer(templates["opened_thinking"], eos="<|eos|>")
    with pytest.raises(DataError, match=r"1 is not rendered exactly.*set a chat_template") as caught:
        load([chat("hi", "<think>\nyes\n</think>\n\nHello")], tokenizer, write_rows)
    assert "in a way that generation could not give" in str(caught.value)
    assert "rows.jsonl:1" in str(caught.value)


# ---- {% generation %} -----------------------------------------------------------------------------------------------------------------


def test_template_marks_are_respected_within_the_turn(make_tokenizer: Make, templates: dict[str, str], write_rows: Write) -> None:
    # the author trains the answer but not the thought; the end of the turn is trained all the same
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{{ '<|im_start|>assistant\n' + m['content'].split('</think>')[0] + '</think>' }}"
        "{% generation %}{{ m['content'].split('</think>')[1] }}{% endgeneration %}{{ '<|im_end|>\n' }}"
        "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = make_tokenizer(template)
    (example,) = load([chat("hi", "<think>because</think>yes", "bye", "<think>no</think>Blue")], tokenizer, write_rows)
    assert said(example, tokenizer) == ["yes<|im_end|>", "Blue<|im_end|>"]


@pytest.mark.parametrize("mark", ["nothing", "everything"])
def test_degenerate_marks_are_not_believed(make_tokenizer: Make, templates: dict[str, str], write_rows: Write, mark: str) -> None:
    body = templates["chatml"]
    template = body + "{% generation %}{% endgeneration %}" if mark == "nothing" else "{% generation %}" + body + "{% endgeneration %}"
    tokenizer = make_tokenizer(template)
    (example,) = load([chat("hi", "Hello there")], tokenizer, write_rows)
    assert said(example, tokenizer) == ["Hello there<|im_end|>"]


def test_marks_tell_where_the_generation_prompt_cannot(make_tokenizer: Make, templates: dict[str, str], write_rows: Write) -> None:
    template = templates["opened_thinking"].replace(
        "{{ '<|assistant|>' + m['content'].split('</think>')[-1] + '<|eos|>' }}",
        "{{ '<|assistant|>' }}{% generation %}{{ m['content'].split('</think>')[-1] }}{% endgeneration %}{{ '<|eos|>' }}",
    )
    assert template != templates["opened_thinking"]
    tokenizer = make_tokenizer(template, eos="<|eos|>")
    (example,) = load([chat("hi", "<think>\nyes\n</think>Hello")], tokenizer, write_rows)
    assert said(example, tokenizer) == ["Hello<|eos|>"]


def test_header_within_the_marks_is_not_trained(make_tokenizer: Make, templates: dict[str, str], write_rows: Write) -> None:
    template = templates["opened_thinking"].replace(
        "{{ '<|assistant|>' + m['content'].split('</think>')[-1] + '<|eos|>' }}",
        "{% generation %}{{ '<|assistant|>' + m['content'].split('</think>')[-1] + '<|eos|>' }}{% endgeneration %}",
    )
    tokenizer = make_tokenizer(template, eos="<|eos|>")
    (example,) = load([chat("hi", "<think>\nyes\n</think>Hello")], tokenizer, write_rows)
    assert said(example, tokenizer) == ["Hello<|eos|>"]


# ---- degenerate -----------------------------------------------------------------------------------------------------------------------


def test_template_that_tells_no_turns_apart_is_refused(make_tokenizer: Make, write_rows: Write) -> None:
    # prompts with nothing, and shows the answer alone
    tokenizer = make_tokenizer("{% if not add_generation_prompt %}{{ messages[-1]['content'] }}{% endif %}")
    with pytest.raises(DataError, match="every token would be trained"):
        load([chat("hi", "Hello there")], tokenizer, write_rows)


def test_template_that_does_not_show_the_answer_is_refused(make_tokenizer: Make, templates: dict[str, str], write_rows: Write) -> None:
    # templates of vision models read lists of parts and show nothing of plain text
    hidden = "(m['content'] if m['content'] is not string else '')"
    tokenizer = make_tokenizer(templates["chatml"].replace("m['content']", hidden))
    with pytest.raises(DataError, match="does not show what the assistant says in message 1: 'Hello there' is missing"):
        load([chat("hi", "Hello there")], tokenizer, write_rows)


def test_eos_behind_the_last_message_splits_nothing_and_is_not_trained(
    make_tokenizer: Make, templates: dict[str, str], write_rows: Write
) -> None:
    # as Phi-3 does
    template = templates["chatml"].replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
    tokenizer = make_tokenizer(template, eos="<|eos|>")
    (example,) = load([chat("hi", "Hello there", "bye", "no")], tokenizer, write_rows)
    assert said(example, tokenizer) == ["Hello there<|im_end|>", "no<|im_end|>"]
    assert tokenizer.eos_token_id not in example.tokens.tolist()


def test_rows_that_train_nothing_are_dropped_counted_and_an_error_if_most(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer()
    empty = {"messages": [{"role": "user", "content": "hi"}]}
    loaded = load_examples([DatasetConfig(path=write_rows([chat("hi", "bye"), empty]))], tokenizer, sequence_len=64)
    assert (loaded.report.rows, loaded.report.kept, loaded.report.untrained) == (2, 1, 1)
    with pytest.raises(DataError, match=r"most rows are lost: 2 of 3 have no token to train"):
        load([chat("hi", "bye"), empty, empty], tokenizer, write_rows)


def test_an_opening_turn_of_the_assistant_is_context(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer()
    messages = [{"role": "assistant", "content": "Hello"}, *chat("hi", "bye")["messages"]]
    (example,) = load([{"messages": messages}], tokenizer, write_rows)
    assert said(example, tokenizer) == ["bye<|im_end|>"]


def test_template_without_special_tokens_ends_with_eos(make_tokenizer: Make, templates: dict[str, str], write_rows: Write) -> None:
    tokenizer = make_tokenizer(templates["plain"], eos="<|eos|>")
    (example,) = load([chat("hi", "Hello there")], tokenizer, write_rows)
    assert said(example, tokenizer) == ["Hello there\n<|eos|>"]
    assert example.tokens.tolist().count(tokenizer.eos_token_id) == 1


def test_no_chat_template_says_what_to_set(make_tokenizer: Make, write_rows: Write) -> None:
    with pytest.raises(DataError, match="has no chat template; set `chat_template`"):
        load([chat("hi", "bye")], make_tokenizer(None), write_rows)


def test_no_eos_says_what_to_set(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer(None)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no eos_token"):
        load([{"text": "hi"}], tokenizer, write_rows)


# ---- merges at the boundary -----------------------------------------------------------------------------------------------------------


def test_turn_that_begins_with_a_newline_is_cut_in_token_space(make_tokenizer: Make, templates: dict[str, str], write_rows: Write) -> None:
    tokenizer = make_tokenizer(templates["chatml"])
    row = chat("hi", "Hello", "bye", "\n\nfive")
    prompt = rendered(tokenizer, row["messages"][:3], add_generation_prompt=True)
    whole = rendered(tokenizer, row["messages"])
    assert whole[: len(prompt)] != prompt, "the case must really merge"
    (example,) = load([row], tokenizer, write_rows)
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert said(example, tokenizer) == ["Hello<|im_end|>", "\n\nfive<|im_end|>"]
    # the same in an earlier turn, which then needs an example of its own
    alone, rest = load([chat("hi", "\n\nfive", "bye", "Hello")], tokenizer, write_rows)
    assert said(alone, tokenizer) == ["\n\nfive<|im_end|>"]
    assert said(rest, tokenizer) == ["Hello<|im_end|>"]


def test_prompt_and_completion_do_not_merge(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer(None, eos="<|eos|>")
    prompt, completion = "The ans", "wer is five."
    alone = tokenizer(prompt)["input_ids"]
    assert tokenizer(prompt + completion)["input_ids"][: len(alone)] != alone, "the case must really merge"
    (example,) = load([{"prompt": prompt, "completion": completion}], tokenizer, write_rows)
    assert example.tokens[: len(alone)].tolist() == alone
    assert said(example, tokenizer) == [completion + "<|eos|>"]
    assert tokenizer.decode(example.tokens) == prompt + completion + "<|eos|>"


def test_tokenizer_that_puts_a_space_first_does_not_put_one_between(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer(None, eos="<|eos|>", prefix_space=True)
    prompt, completion = "The ans", "wer is five."
    (example,) = load([{"prompt": prompt, "completion": completion}], tokenizer, write_rows)
    assert tokenizer.decode(example.tokens).strip() == prompt + completion + "<|eos|>"
    assert said(example, tokenizer) == [completion + "<|eos|>"]


# ---- pad equals eos, eos once ---------------------------------------------------------------------------------------------------------


def test_stop_is_masked_by_position_where_pad_equals_eos(make_tokenizer: Make, write_rows: Write) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "a": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 13)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="</s>", unk_token="<unk>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    (example,) = load([{"prompt": "w10 w11 ", "completion": "w12"}], tokenizer, write_rows)
    labels = np.where(example.mask, example.tokens, -100)
    # of [10, 11, 12, 2, 2, 2] with a true length of 4 and a prompt of 2: nothing is ever padded, and the end is trained
    assert example.tokens.tolist() == [10, 11, 12, 2]
    assert labels.tolist() == [-100, -100, 12, 2]


def test_eos_is_appended_once(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer(None, eos="<|eos|>")
    for row in ({"text": "Hello there"}, {"text": "Hello there<|eos|>"}):
        (example,) = load([row], tokenizer, write_rows)
        assert example.tokens.tolist().count(tokenizer.eos_token_id) == 1
        assert example.tokens[-1] == tokenizer.eos_token_id
        assert example.mask.tolist() == [False] + [True] * (len(example) - 1)
    for completion in ("five", "five<|eos|>"):
        (example,) = load([{"prompt": "hi ", "completion": completion}], tokenizer, write_rows)
        assert said(example, tokenizer) == ["five<|eos|>"]


# ---- other masks ----------------------------------------------------------------------------------------------------------------------


def test_all_tokens_where_asked_for(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer()
    row = chat("hi", "Hello there")
    (example,) = load([row], tokenizer, write_rows, assistant_only_loss=False)
    assert example.tokens.tolist() == rendered(tokenizer, row["messages"])
    assert example.mask.tolist() == [False] + [True] * (len(example) - 1)
    (example,) = load([{"prompt": "hi ", "completion": "five"}], tokenizer, write_rows, completion_only_loss=False)
    assert example.mask.tolist() == [False] + [True] * (len(example) - 1)


def test_prompt_completion_chat_trains_the_completion(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer()
    turns = chat("hi", "Hello", "bye", "no")["messages"]
    row = {"prompt": turns[:3], "completion": turns[3:]}
    (example,) = load([row], tokenizer, write_rows)
    assert said(example, tokenizer) == ["no<|im_end|>"]
    (example,) = load([row], tokenizer, write_rows, completion_only_loss=False)
    assert said(example, tokenizer) == ["Hello<|im_end|>", "no<|im_end|>"]
    (example,) = load([row], tokenizer, write_rows, assistant_only_loss=False)
    assert said(example, tokenizer) == ["no<|im_end|>\n"]


def test_system_prompt_is_put_before_where_there_is_none(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer()
    own = {"messages": [{"role": "system", "content": "no"}, *chat("hi", "bye")["messages"]]}
    first, second = load([chat("hi", "bye"), own], tokenizer, write_rows, system_prompt="Be fine")
    assert tokenizer.decode(first.tokens).startswith("<|im_start|>system\nBe fine<|im_end|>")
    assert tokenizer.decode(second.tokens).startswith("<|im_start|>system\nno<|im_end|>")


# ---- pairs ----------------------------------------------------------------------------------------------------------------------------


def test_pairs_train_the_answers_of_one_prompt(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer()
    prompt = chat("hi")["messages"]
    explicit = {
        "prompt": prompt,
        "chosen": [{"role": "assistant", "content": "yes"}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    implicit = {"chosen": chat("hi", "yes")["messages"], "rejected": chat("hi", "no")["messages"]}
    repeated = {"prompt": "hi", **implicit}
    pairs = load_pairs([DatasetConfig(path=write_rows([explicit, implicit, repeated]))], tokenizer, sequence_len=64).items
    for pair in pairs:
        assert said(pair.chosen, tokenizer) == ["yes<|im_end|>"]
        assert said(pair.rejected, tokenizer) == ["no<|im_end|>"]
        assert pair.chosen.tokens.tolist() == pairs[0].chosen.tokens.tolist()
        start = int(np.argmax(pair.chosen.mask))
        assert start == int(np.argmax(pair.rejected.mask))
        assert pair.chosen.tokens[:start].tolist() == rendered(tokenizer, prompt, add_generation_prompt=True)


def test_text_pairs_with_an_implicit_prompt_are_cut_at_a_word(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer(None, eos="<|eos|>")
    row = {"chosen": "user: hi\n\nassistant: Hello there", "rejected": "user: hi\n\nassistant: How are you"}
    (pair,) = load_pairs([DatasetConfig(path=write_rows([row]))], tokenizer, sequence_len=64).items
    assert said(pair.chosen, tokenizer) == [" Hello there<|eos|>"]
    assert said(pair.rejected, tokenizer) == [" How are you<|eos|>"]


def test_identical_pairs_are_counted(make_tokenizer: Make, write_rows: Write) -> None:
    same = chat("hi", "yes")["messages"]
    rows = [{"chosen": same, "rejected": same}, {"chosen": same, "rejected": chat("hi", "no")["messages"]}]
    loaded = load_pairs([DatasetConfig(path=write_rows(rows))], make_tokenizer(), sequence_len=64)
    assert loaded.report.identical_pairs == 1
    assert len(loaded.items) == 2
    assert "1 pair with identical sides" in str(loaded.report)
