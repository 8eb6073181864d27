"""Rows that are too long, and the real tokenizer of SmolLM2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from surogate_rl.config.schema import DatasetConfig
from surogate_rl.data import DataError, encode_prompt, load_examples, load_pairs
from surogate_rl.rollouts.types import Task

Make = Callable[..., PreTrainedTokenizerFast]
Write = Callable[..., str]


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_filter_drops_and_counts(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer()
    rows = [chat("hi", "yes"), chat("hi", "yes " * 100), chat("hi " * 100, "yes")]
    loaded = load_examples([DatasetConfig(path=write_rows(rows))], tokenizer, sequence_len=40, overlong="filter")
    report = loaded.report
    assert (report.rows, report.kept, report.overlong, report.truncated, report.untrained) == (3, 1, 2, 0, 0)
    assert report.tokens == len(loaded.items[0])
    assert report.trained_tokens == loaded.items[0].trained


def test_truncation_keeps_the_beginning_and_drops_what_lost_its_answer(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer()
    rows = [chat("hi", "yes"), chat("hi", "yes " * 100), chat("hi " * 100, "yes")]
    loaded = load_examples([DatasetConfig(path=write_rows(rows))], tokenizer, sequence_len=40, overlong="truncate")
    report = loaded.report
    assert (report.rows, report.kept, report.overlong, report.truncated, report.untrained) == (3, 2, 0, 1, 1)
    whole = load_examples([DatasetConfig(path=write_rows(rows[1:2]))], tokenizer, sequence_len=1000).items[0]
    assert loaded.items[1].tokens.tolist() == whole.tokens[:40].tolist()
    assert loaded.items[1].mask.tolist() == whole.mask[:40].tolist()


def test_truncation_that_takes_most_labels_is_an_error(make_tokenizer: Make, write_rows: Write) -> None:
    rows = [chat("hi", "yes"), chat("hi " * 100, "yes"), chat("hi " * 100, "no")]
    with pytest.raises(DataError, match=r"most rows are lost: 2 of 3 have no token to train; raise sequence_len \(now 40\)"):
        load_examples([DatasetConfig(path=write_rows(rows))], make_tokenizer(), sequence_len=40, overlong="truncate")


def test_nothing_left_is_an_error_with_numbers(make_tokenizer: Make, write_rows: Write) -> None:
    path = write_rows([chat("hi", "yes")] * 3)
    with pytest.raises(DataError, match=r"no example is left of 3 rows: 3 are longer than sequence_len \(4\).*set overlong: truncate"):
        load_examples([DatasetConfig(path=path)], make_tokenizer(), sequence_len=4)


def test_empty_file_is_an_error(make_tokenizer: Make, write_rows: Write) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl: the data set is empty \(0 rows\)"):
        load_examples([DatasetConfig(path=write_rows([]))], make_tokenizer(), sequence_len=4)


def test_pairs_lose_both_sides_together(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer()
    prompt, yes = [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "yes"}]
    long = [{"role": "assistant", "content": "no " * 100}]
    far = [{"role": "user", "content": "hi " * 100}]
    rows = [
        {"prompt": prompt, "chosen": yes, "rejected": yes},
        {"prompt": prompt, "chosen": yes, "rejected": long},
        {"prompt": far, "chosen": yes, "rejected": yes},
    ]
    path = write_rows(rows)
    report = load_pairs([DatasetConfig(path=path)], tokenizer, sequence_len=40, overlong="filter").report
    assert (report.kept, report.overlong, report.identical_pairs) == (1, 2, 1)
    loaded = load_pairs([DatasetConfig(path=path)], tokenizer, sequence_len=40, overlong="truncate")
    assert (loaded.report.kept, loaded.report.truncated, loaded.report.untrained) == (2, 1, 1)
    assert len(loaded.items[1].rejected) == 40


def test_many_rows_in_batches_keep_their_order(make_tokenizer: Make, write_rows: Write) -> None:
    tokenizer = make_tokenizer()
    rows = [chat("hi", str(i)) for i in range(1000)]
    loaded = load_examples([DatasetConfig(path=write_rows(rows))], tokenizer, sequence_len=64)
    assert [tokenizer.decode(e.tokens[e.mask]) for e in loaded.items] == [f"{i}<|im_end|>" for i in range(1000)]


def test_local_data_need_no_network(tmp_path: Path, write_rows: Write) -> None:
    path = write_rows([{"prompt": "hi"}])
    script = (
        "import socket\n"
        "def refuse(*a, **k): raise AssertionError('network used')\n"
        "socket.socket.connect = refuse\n"
        "socket.getaddrinfo = refuse\n"
        "from surogate_rl.config.schema import DatasetConfig\n"
        "from surogate_rl.data.sources import open_source\n"
        f"print(len(open_source(DatasetConfig(path={path!r}), 0)))\n"
        "print(len(open_source(DatasetConfig(path='reasoning_gym/chain_sum', size=4), 0)))\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.stdout.split() == ["1", "4"], done.stderr


def test_smollm2_masks(smollm2_gguf: Path, write_rows: Write) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name)
    messages = [*chat("What is 2+3?", "It is 5.")["messages"], *chat("And twice that?", "\n\n10")["messages"]]
    (example,) = load_examples([DatasetConfig(path=write_rows([{"messages": messages}]))], tokenizer, sequence_len=512).items
    prompt = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True, return_dict=False)
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert encode_prompt(Task(0, messages[:3], None, {}), tokenizer) == prompt
    assert tokenizer.decode(example.tokens[example.mask]) == "It is 5.<|im_end|>\n\n10<|im_end|>"
    assert tokenizer.decode(example.tokens) == tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
    # BOS is <|im_start|> here: one before each of the five messages, none besides
    assert example.tokens.tolist().count(tokenizer.bos_token_id) == 5
