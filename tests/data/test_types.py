"""Types of rows: recognised, converted, refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from surogate_rl.config.schema import DatasetConfig
from surogate_rl.data import DataError, load_examples, load_pairs, load_tasks
from surogate_rl.data.detect import Purpose, detect
from surogate_rl.data.sources import Source

Make = Callable[..., PreTrainedTokenizerFast]
Write = Callable[..., str]

USER = {"role": "user", "content": "hi"}
BOT = {"role": "assistant", "content": "Hello"}
NO = {"role": "assistant", "content": "no"}
GPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "Hello"}]


def type_of(row: dict[str, Any], purpose: Purpose, wanted: str = "auto") -> str:
    return detect(Source("rows", list(row), [row]), wanted, purpose)


@pytest.mark.parametrize(
    ("row", "purpose", "expected"),
    [
        ({"messages": [USER, BOT]}, "sft", "messages"),
        ({"conversations": [USER, BOT]}, "sft", "messages"),
        ({"conversations": GPT, "source": "x", "score": 5.1}, "sft", "sharegpt"),
        ({"messages": GPT}, "sft", "sharegpt"),
        ({"messages": '[{"role": "user", "content": "hi"}]'}, "sft", "messages"),
        ({"prompt": "a", "completion": "b"}, "sft", "prompt_completion"),
        ({"prompt": [USER], "completion": [BOT]}, "sft", "prompt_completion"),
        ({"prompt": "a", "prompt_id": "x", "messages": [USER, BOT]}, "sft", "messages"),
        ({"instruction": "a", "input": "", "output": "b", "text": "c"}, "sft", "instruction"),
        ({"text": "a", "id": 3}, "sft", "text"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "dpo", "preference"),
        ({"chosen": [USER, BOT], "rejected": [USER, NO]}, "dpo", "preference"),
        ({"prompt": "a", "chosen": [USER, BOT], "rejected": [USER, NO], "messages": [USER, BOT]}, "dpo", "preference"),
        ({"prompt": "a", "chosen": [USER, BOT], "rejected": [USER, NO], "messages": [USER, BOT]}, "sft", "messages"),
        ({"prompt": "a", "answer": "b"}, "grpo", "prompt"),
        ({"prompt": [USER], "answer": "b"}, "grpo", "prompt"),
        ({"prompt": "a", "completion": "b"}, "grpo", "prompt_completion"),
        ({"prompt": "a", "messages": [USER, BOT]}, "grpo", "prompt"),
        ({"messages": [USER], "answer": "b"}, "grpo", "messages"),
        ({"instruction": "a", "output": "b"}, "grpo", "instruction"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "grpo", "preference"),
    ],
)
def test_recognised(row: dict[str, Any], purpose: Purpose, expected: str) -> None:
    assert type_of(row, purpose) == expected
    assert type_of(row, purpose, expected) == expected


def test_what_fits_nothing_lists_columns_and_known_types() -> None:
    with pytest.raises(DataError) as caught:
        type_of({"question": "a", "answer": "b", "level": 3, "tags": ["x"]}, "grpo")
    message = str(caught.value)
    assert "question (text), answer (text), level (int), tags (list of text)" in message
    for known in ("prompt:", "messages:", "sharegpt:", "instruction:"):
        assert known in message
    assert "columns: {prompt: question}" in message


@pytest.mark.parametrize(
    ("row", "purpose", "wanted", "message"),
    [
        ({"prompt": "a"}, "sft", "auto", "its rows are of type prompt, which sft cannot use"),
        ({"text": "a"}, "dpo", "auto", "its rows are of type text, which dpo cannot use"),
        ({"text": "a"}, "grpo", "text", "grpo cannot use rows of type text"),
        ({"question": "a"}, "grpo", "prompt", "rows of type prompt need a column 'prompt'; the columns are question"),
        ({"chosen": "a"}, "dpo", "preference", "need a column 'rejected'"),
        ({"text": "a"}, "sft", "alpaca", "unknown type 'alpaca'; known types: messages"),
    ],
)
def test_refused(row: dict[str, Any], purpose: Purpose, wanted: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        type_of(row, purpose, wanted)


def test_empty_data_set() -> None:
    with pytest.raises(DataError, match=r"rows: the data set is empty \(0 rows\)"):
        detect(Source("rows", [], []), "auto", "sft")


# ---- rows into text -------------------------------------------------------------------------------------------------------------------


def texts(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, write: Write, **options: Any) -> list[str]:
    loaded = load_examples([DatasetConfig(path=write(rows), **options)], tokenizer, sequence_len=512)
    return [tokenizer.decode(example.tokens) for example in loaded.items]


HI = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, BOT]},
        {"conversations": GPT},
        {"prompt": [USER], "completion": [BOT]},
        {"prompt": "hi", "completion": [BOT]},
        {"prompt": [USER], "completion": "Hello"},
        {"instruction": "hi", "output": "Hello"},
        {"instruction": "hi", "input": None, "output": "Hello"},
        {"messages": [{**USER, "name": None, "tool_calls": None}, BOT]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, BOT]},
    ],
)
def test_one_conversation_in_every_form(row: dict[str, Any], make_tokenizer: Make, write_rows: Write) -> None:
    assert texts([row], make_tokenizer(), write_rows) == [HI]


def test_instruction_without_a_chat_template_is_worded_as_alpaca(make_tokenizer: Make, write_rows: Write) -> None:
    rows = [{"instruction": "Say it.", "input": "five", "output": "yes"}, {"instruction": "Say it.", "input": "", "output": "yes"}]
    assert texts(rows, make_tokenizer(None, eos="<|eos|>"), write_rows) == [
        "### Instruction:\nSay it.\n\n### Input:\nfive\n\n### Response:\nyes<|eos|>",
        "### Instruction:\nSay it.\n\n### Response:\nyes<|eos|>",
    ]


def test_input_follows_the_instruction_in_a_chat(make_tokenizer: Make, write_rows: Write) -> None:
    (text,) = texts([{"instruction": "Say it.", "input": "five", "output": "yes"}], make_tokenizer(), write_rows)
    assert text == "<|im_start|>user\nSay it.\n\nfive<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"


def test_gym_rows_can_be_learned_from(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    loaded = load_examples([DatasetConfig(path="reasoning_gym/chain_sum", size=3)], tokenizer, sequence_len=512, seed=1)
    import reasoning_gym

    for example, entry in zip(loaded.items, reasoning_gym.create_dataset("chain_sum", size=3, seed=1), strict=True):
        assert tokenizer.decode(example.tokens[example.mask]) == entry["answer"] + "<|im_end|>"
        assert entry["question"] in tokenizer.decode(example.tokens)
    with pytest.raises(DataError, match="gives no answers to learn from"):
        load_examples([DatasetConfig(path="reasoning_gym/rush_hour", size=3)], tokenizer, sequence_len=512)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": None}, r"rows\.jsonl:2: column 'text' must be text, it is None"),
        ({"text": 3}, r"rows\.jsonl:2: column 'text' must be text, it is int 3"),
        ({"text": ""}, r"rows\.jsonl:2: column 'text' is empty"),
        ({"body": "a"}, r"rows\.jsonl:2: no column 'text'; the row has body"),
    ],
)
def test_malformed_text_names_the_row(row: dict[str, Any], message: str, make_tokenizer: Make, write_rows: Write) -> None:
    with pytest.raises(DataError, match=message):
        texts([{"text": "fine"}, row], make_tokenizer(), write_rows)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "the list of messages is empty"),
        (None, "no column 'messages' or 'conversations'"),
        ("hello", "expected a list of messages, got text"),
        (["hello"], "message 0: expected an object with role and content, got text"),
        ([USER, {"role": "assistant", "content": None}], "message 1: the content of assistant must be text, got None"),
        ([USER, {"role": "assistant", "content": 5}], "message 1: the content of assistant must be text, got int 5"),
        ([{"content": "hi"}], "message 0: its role must be text"),
        ([{"from": "alien", "value": "hi"}], "message 0: unknown speaker 'alien'"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "only text can be trained on"),
    ],
)
def test_malformed_messages_name_row_and_message(value: Any, message: str, make_tokenizer: Make, write_rows: Write) -> None:
    with pytest.raises(DataError, match=message) as caught:
        texts([{"messages": [USER, BOT]}, {"messages": value}], make_tokenizer(), write_rows)
    assert "rows.jsonl:2" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hi", "chosen": "a", "rejected": ""}, "column 'rejected' is empty"),
        ({"prompt": "hi", "chosen": "a", "rejected": None}, "column 'rejected' must be text, it is None"),
        ({"prompt": "hi", "chosen": "a", "rejected": [NO]}, "chosen is text but rejected is a list"),
        ({"chosen": "a b", "rejected": "c d"}, "share no beginning that could be the prompt; give a column 'prompt'"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [NO]}, "column 'chosen' has no message of the assistant"),
    ],
)
def test_malformed_pairs_name_the_row(row: dict[str, Any], message: str, make_tokenizer: Make, write_rows: Write) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load_pairs([DatasetConfig(path=write_rows([row]))], make_tokenizer(), sequence_len=64)
    assert "rows.jsonl:1" in str(caught.value)


def test_a_system_prompt_does_not_go_with_text(make_tokenizer: Make, write_rows: Write) -> None:
    with pytest.raises(DataError, match="a system_prompt has no place in rows of type text"):
        texts([{"text": "a"}], make_tokenizer(), write_rows, system_prompt="b")


# ---- tasks ----------------------------------------------------------------------------------------------------------------------------


def tasks(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, write: Write, **options: Any) -> list[Any]:
    return list(load_tasks([DatasetConfig(path=write(rows), **options)], tokenizer, max_prompt_length=100).items)


def test_tasks_of_every_type(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer()
    (text,) = tasks([{"prompt": "hi", "answer": "5", "n": 3}], tokenizer, write_rows)
    assert (text.prompt, text.messages, dict(text.columns)) == ("hi", None, {"answer": "5", "n": 3})
    (chat,) = tasks([{"prompt": [USER], "answer": "5"}], tokenizer, write_rows, system_prompt="Be fine")
    assert chat.messages == [{"role": "system", "content": "Be fine"}, USER]
    (asked,) = tasks([{"prompt": "hi", "answer": "5"}], tokenizer, write_rows, system_prompt="Be fine")
    assert asked.messages == chat.messages
    (cut,) = tasks([{"messages": [USER, BOT, USER, NO]}], tokenizer, write_rows)
    assert (cut.messages, dict(cut.columns)) == ([USER, BOT, USER], {"reference": "no"})
    (answered,) = tasks([{"prompt": "hi", "completion": "yes"}], tokenizer, write_rows)
    assert (answered.prompt, dict(answered.columns)) == ("hi", {"reference": "yes"})
    (instruction,) = tasks([{"instruction": "hi", "output": "yes"}], tokenizer, write_rows)
    assert (instruction.messages, dict(instruction.columns)) == ([USER], {"instruction": "hi", "output": "yes"})
    (given,) = tasks([{"prompt": [USER], "tools": [{"type": "function", "x": None}]}], tokenizer, write_rows)
    assert given.tools == [{"type": "function"}]


def test_gym_tasks_carry_what_scoring_needs(make_tokenizer: Make) -> None:
    import reasoning_gym

    config = DatasetConfig(path="reasoning_gym/countdown", size=3, args={"min_numbers": 3, "max_numbers": 3})
    loaded = load_tasks([config], make_tokenizer(), max_prompt_length=None, seed=5)
    for task in loaded.items:
        made = task.columns["reasoning_gym"]
        scorer = reasoning_gym.create_dataset(made["task"], **made["args"], size=1, seed=0)
        assert scorer.score_answer(task.columns["answer"], task.columns["entry"]) == 1.0
        assert task.messages == [{"role": "user", "content": task.columns["question"]}]
    plain = load_tasks([config], make_tokenizer(None), max_prompt_length=None, seed=5)
    assert [task.prompt for task in plain.items] == [task.columns["question"] for task in loaded.items]


def test_long_prompts_are_filtered_and_counted(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer()
    rows = [{"prompt": "hi " * n, "answer": n} for n in (1, 300, 2, 300)]
    first, second = write_rows(rows, "a.jsonl"), write_rows(rows[:1], "b.jsonl")
    loaded = load_tasks([DatasetConfig(path=first), DatasetConfig(path=second)], tokenizer, max_prompt_length=100)
    assert [task.columns["answer"] for task in loaded.items] == [1, 2, 1]
    assert [task.index for task in loaded.items] == [0, 2, 4]
    assert (loaded.report.rows, loaded.report.kept, loaded.report.overlong) == (5, 3, 2)
    assert "2 dropped as too long" in str(loaded.report)
    length = len(tokenizer("hi hi ")["input_ids"])
    assert len(load_tasks([DatasetConfig(path=first)], tokenizer, max_prompt_length=length).items) == 2
    assert len(load_tasks([DatasetConfig(path=first)], tokenizer, max_prompt_length=length - 1).items) == 1
    with pytest.raises(
        DataError, match=r"no prompt is left of 4 rows: 4 are longer than rollouts.max_prompt_length \(1\); raise rollouts.max_prompt"
    ):
        load_tasks([DatasetConfig(path=first)], tokenizer, max_prompt_length=1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": ""}, "column 'prompt' is empty"),
        ({"prompt": [USER, BOT]}, "the prompt ends with a message of the assistant"),
        ({"messages": [BOT]}, "there is no message to answer, only assistant"),
        ({"prompt": "a", "tools": "{"}, "column 'tools' is not valid JSON"),
    ],
)
def test_malformed_tasks_name_the_row(row: dict[str, Any], message: str, make_tokenizer: Make, write_rows: Write) -> None:
    with pytest.raises(DataError, match=message) as caught:
        tasks([row], make_tokenizer(), write_rows)
    assert "rows.jsonl:1" in str(caught.value)


def test_chat_prompts_without_a_template_say_what_to_set(make_tokenizer: Make, write_rows: Write) -> None:
    with pytest.raises(DataError, match="set `chat_template`"):
        tasks([{"prompt": [USER]}], make_tokenizer(None), write_rows)
