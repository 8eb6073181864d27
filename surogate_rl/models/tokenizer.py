"""The tokenizer beside a model: chat template, how many ids it has, and which of them end a completion."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import jinja2
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from surogate_rl.files import user_path
from surogate_rl.models.errors import ModelError
from surogate_rl.models.locate import local_directory

logger = logging.getLogger(__name__)


def load_tokenizer(path: str, *, chat_template: str | None = None, why: str = "") -> PreTrainedTokenizerBase:
    """A tokenizer from a directory or hub id, with its chat template replaced if one is given.

    Raises:
        ModelError: there is none, or the template is not valid Jinja.
    """
    directory = local_directory(path, weights=False)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers raises anything from OSError to KeyError for a directory without a usable tokenizer
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{directory}: no usable tokenizer{why}; set tokenizer: to a directory or hub id that has one ({reason})"
        ) from error
    if not tokenizer.get_vocab():
        raise ModelError(f"{directory}: the tokenizer has no vocabulary{why}; set tokenizer: to a directory or hub id that has one")
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
    return tokenizer


def read_chat_template(text_or_path: str) -> str:
    """Jinja text as it is, or the content of the file that is named; what holds ``{{`` or ``{%`` is text.

    Raises:
        ModelError: there is no such file, or the text is not valid Jinja.
    """
    text, where = text_or_path, "chat_template"
    if "{{" not in text and "{%" not in text:
        path = user_path(text)
        if not path.is_file():
            raise ModelError(f"chat_template {text!r} is neither Jinja text (it has no {{{{ or {{%) nor an existing file")
        text, where = path.read_text(encoding="utf-8"), f"chat_template {path}"
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_without_generation_tags(text))
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"{where}: line {error.lineno}: {error.message}; it must be a Jinja template") from error
    return text


def _without_generation_tags(text: str) -> str:
    """``{% generation %}`` is transformers' own tag for the assistant's part; plain Jinja does not know it."""
    for tag in ("generation", "endgeneration"):
        for left in ("{%", "{%-"):
            for right in ("%}", "-%}"):
                text = text.replace(f"{left} {tag} {right}", "")
    return text


def count_ids(tokenizer: PreTrainedTokenizerBase, vocab: int) -> int:
    """How many leading ids the tokenizer has: its highest id + 1, at most the rows of the embedding.

    Models often round their embedding up; the ids from here on never occur and count as impossible in sampler and learner.
    """
    count = max(tokenizer.get_vocab().values()) + 1
    if count > vocab:
        extra = sorted(token for token, index in tokenizer.get_vocab().items() if index >= vocab)
        logger.warning(
            "the tokenizer has %d token(s) without a row in the embedding (%s); text that holds them is refused",
            len(extra),
            ", ".join(extra[:3]),
        )
    return min(count, vocab)


def find_stop_ids(
    config: PretrainedConfig, generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase, vocab: int
) -> tuple[int, ...]:
    """Every id that ends a completion: of the config, the generation config, the tokenizer's eos, and what its chat template puts after an
    assistant's turn. The padding id plays no part, so that a model whose padding is its eos still stops."""
    found: set[int] = set()
    for source in (config, generation, tokenizer):
        found |= set(_as_ids(getattr(source, "eos_token_id", None)))
    turn = _end_of_turn(tokenizer)
    if turn is not None:
        found.add(turn)
    inside = tuple(sorted(index for index in found if 0 <= index < vocab))
    if not inside:
        logger.warning("no end-of-sequence id in config, generation config or tokenizer: completions end only by length or stop strings")
    return inside


def _as_ids(value: Any) -> Iterable[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes right after an assistant's message, if it does."""
    if not tokenizer.chat_template:
        return None
    marker = "surogate"
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}, {"role": "assistant", "content": marker}], tokenize=False)
    except Exception:  # a template may refuse this conversation for reasons of its own; then it says nothing about turns
        return None
    after = str(text).rpartition(marker)[2]
    special = sorted(filter(None, set(tokenizer.all_special_tokens)), key=len, reverse=True)
    for token in special:
        if after.startswith(token):
            index = tokenizer.convert_tokens_to_ids(token)
            return index if isinstance(index, int) else None
    return None
