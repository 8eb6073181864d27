"""Tokenizers: number of ids, stop ids, chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from surogate_rl.models import ModelError, inspect_model, load_model

TEMPLATE = "{% for m in messages %}<bos>{{ m['content'] }}<unk>{% endfor %}"


def retokenize(directory: Path, change: Callable[[Any], None]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    change(tokenizer)
    tokenizer.save_pretrained(directory)


def test_ids_of_a_rounded_up_vocabulary(tiny: Callable[..., Any]) -> None:
    loaded = tiny("llama").loaded
    assert (loaded.valid_vocab, loaded.spec.vocab) == (50, 61)


def test_added_tokens_count(tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    retokenize(made.directory, lambda t: t.add_tokens(["x1", "x2"]))
    assert load_model(str(made.directory)).valid_vocab == 52


def test_tokens_without_a_row_are_said(tiny: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    made = tiny("llama")
    retokenize(made.directory, lambda t: t.add_tokens([f"x{i}" for i in range(20)]))
    assert load_model(str(made.directory)).valid_vocab == 61
    assert "the tokenizer has 9 token(s) without a row in the embedding" in caplog.text


def test_stop_ids_are_the_union_of_all_sources(tiny: Callable[..., Any]) -> None:
    made = tiny("llama", eos_token_id=[3, 4])
    GenerationConfig(eos_token_id=[4, 7]).save_pretrained(made.directory)
    loaded = load_model(str(made.directory))
    assert loaded.stop_ids == (2, 3, 4, 7)  # 2 is the tokenizer's, which is its padding too
    assert loaded.generation_config is not None
    assert loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id == 2


def test_the_end_of_a_turn_in_the_chat_template_stops(tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    assert load_model(str(made.directory)).stop_ids == (2,)
    assert load_model(str(made.directory), chat_template=TEMPLATE).stop_ids == (0, 2)  # <unk> is special and closes the turn
    assert load_model(str(made.directory), chat_template=TEMPLATE.replace("<unk>", "w5")).stop_ids == (2,)  # an ordinary word does not
    refusing = "{{ raise_exception('no') }}"
    assert load_model(str(made.directory), chat_template=refusing).stop_ids == (2,)


def test_ids_that_cannot_be_sampled_do_not_stop(tiny: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    made = tiny("llama", eos_token_id=None)
    GenerationConfig(eos_token_id=[99]).save_pretrained(made.directory)
    retokenize(made.directory, lambda t: setattr(t, "eos_token", None))
    assert load_model(str(made.directory)).stop_ids == ()
    assert "no end-of-sequence id in config, generation config or tokenizer" in caplog.text


def test_chat_template_as_text_or_file(tiny: Callable[..., Any], tmp_path: Path) -> None:
    made = tiny("llama")
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    for given in (TEMPLATE, str(tmp_path / "chat.jinja")):
        tokenizer = load_model(str(made.directory), chat_template=given).tokenizer
        assert tokenizer.apply_chat_template([{"role": "user", "content": "w1"}], tokenize=False) == "<bos>w1<unk>"
    with_tag = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{%- continue %}{% endfor %}"
    assert load_model(str(made.directory), chat_template=with_tag).tokenizer.chat_template == with_tag


def test_broken_chat_templates(tiny: Callable[..., Any], tmp_path: Path) -> None:
    directory = str(tiny("llama").directory)
    with pytest.raises(ModelError, match=r"chat_template 'chatml' is neither Jinja text \(it has no {{ or {%\) nor an existing file"):
        load_model(directory, chat_template="chatml")
    with pytest.raises(ModelError, match=r"chat_template: line 2: .*; it must be a Jinja template"):
        load_model(directory, chat_template="{{ 1 }}\n{% for m in %}")
    (tmp_path / "chat.jinja").write_text("{% endfor %}")
    with pytest.raises(ModelError, match=r"chat_template .*chat.jinja: line 1: .*; it must be a Jinja template"):
        load_model(directory, chat_template=str(tmp_path / "chat.jinja"))


def test_another_tokenizer(tiny: Callable[..., Any], parity: Any, tmp_path: Path) -> None:
    made = tiny("llama")
    parity.save_tokenizer(tmp_path / "other", size=30)
    assert load_model(str(made.directory), tokenizer=str(tmp_path / "other")).valid_vocab == 30
    inspect_model(str(made.directory), tokenizer=str(tmp_path / "other"))
    with pytest.raises(ModelError, match="there is no such directory"):
        inspect_model(str(made.directory), tokenizer="./nowhere")


def test_no_tokenizer(tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    for path in made.directory.glob("*token*"):
        path.unlink()
    with pytest.raises(
        ModelError, match=r"no usable tokenizer beside the model; set tokenizer: to a directory or hub id that has one|no vocabulary"
    ):
        load_model(str(made.directory))


def test_broken_generation_config(tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    (made.directory / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config.json is not valid JSON"):
        load_model(str(made.directory))


def test_sampling_settings_of_the_generation_config_are_kept_apart(tiny: Callable[..., Any]) -> None:
    """They are there to be saved again, and nothing reads them as settings of a run."""
    made = tiny("llama")
    (made.directory / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.3, "top_k": 7, "do_sample": True}))
    loaded = load_model(str(made.directory))
    assert loaded.generation_config is not None
    assert loaded.generation_config.top_k == 7
    assert loaded.stop_ids == (2,)
