"""Data sets into encoded examples and pairs, with counts of what became of every row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np

from surogate_rl.data.convert import Conversation, Converter, PromptCompletion, Unit
from surogate_rl.data.detect import detect
from surogate_rl.data.report import DataReport, DatasetReport, Loaded, UnusableRow, require_embedded, require_usable
from surogate_rl.data.sources import Source, open_source
from surogate_rl.data.template import ChatEncoder, Example, Rendering, make_example
from surogate_rl.data.tokens import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_rl.config.schema import DatasetConfig

Overlong = Literal["filter", "truncate"]

BATCH = 256


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt; only the answers are trained."""

    chosen: Example
    rejected: Example

    @property
    def identical(self) -> bool:
        return np.array_equal(self.chosen.tokens, self.rejected.tokens)


@dataclass(frozen=True)
class _Masking:
    assistant_only: bool
    completion_only: bool


def load_examples(
    datasets: Sequence[DatasetConfig],
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_len: int,
    vocab: int | None = None,
    overlong: Overlong = "filter",
    seed: int = 0,
    assistant_only_loss: bool = True,
    completion_only_loss: bool = True,
) -> Loaded[Example]:
    """Examples for supervised training, in the order of data sets and rows.

    Args:
        sequence_len: tokens of an example at the most.
        vocab: rows of the model's embedding, which every id must be below; None: not checked.
        overlong: ``filter`` drops longer ones, ``truncate`` keeps their first `sequence_len` tokens.
        seed: of generated rows, where the data set has none of its own.
        assistant_only_loss: conversations train the assistant's turns, with the token that ends each, and nothing else.
        completion_only_loss: prompt/completion rows train the completion, with its end, and nothing else.

    Raises:
        MissingData: a local path that is not there.
        DataError: a malformed row (named), a token that the model does not have, rows of no usable type, a data set of which nothing is
            left or most rows train nothing.
    """
    encoder = _Encoder(Tokens(tokenizer), _Masking(assistant_only_loss, completion_only_loss))
    examples: list[Example] = []
    reports = []
    for config in datasets:
        source = open_source(config, seed)
        row_type = detect(source, config.type, "sft")
        convert = Converter(row_type, label=source.label, chat=bool(tokenizer.chat_template), system_prompt=config.system_prompt)
        report = DatasetReport(config.path, row_type)
        for where, encoded in encoder.encode(source, report, lambda row, where, c=convert: [c.unit(row, where)]):  # type: ignore[misc]
            kept = _fitted(encoded[0], sequence_len, overlong, report)
            report.kept += bool(kept)
            report.split += len(encoded[0]) > 1
            for example in kept:
                require_embedded(example.tokens, vocab, where, tokenizer)
                _count(report, example)
            report.items += len(kept)
            examples.extend(kept)
        require_usable(report, "sequence_len", sequence_len, "example")
        reports.append(report)
    return Loaded(examples, DataReport(tuple(reports)))


def load_pairs(
    datasets: Sequence[DatasetConfig],
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_len: int,
    vocab: int | None = None,
    overlong: Overlong = "filter",
    seed: int = 0,
) -> Loaded[Pair]:
    """Preference pairs, in the order of data sets and rows; each side has `sequence_len` tokens at the most. Raises as `load_examples`."""
    encoder = _Encoder(Tokens(tokenizer), _Masking(assistant_only=True, completion_only=True))
    pairs: list[Pair] = []
    reports = []
    for config in datasets:
        source = open_source(config, seed)
        row_type = detect(source, config.type, "dpo")
        convert = Converter(row_type, label=source.label, chat=bool(tokenizer.chat_template), system_prompt=config.system_prompt)
        report = DatasetReport(config.path, row_type)
        for where, encoded in encoder.encode(source, report, lambda row, where, c=convert: c.pair(row, where), whole=True):  # type: ignore[misc]
            pair = _fitted_pair(Pair(encoded[0][0], encoded[1][0]), sequence_len, overlong, report)
            if pair is None:
                continue
            report.kept += 1
            report.items += 1
            report.identical_pairs += pair.identical
            for side in (pair.chosen, pair.rejected):
                require_embedded(side.tokens, vocab, where, tokenizer)
                _count(report, side)
            pairs.append(pair)
        require_usable(report, "sequence_len", sequence_len, "pair")
        reports.append(report)
    return Loaded(pairs, DataReport(tuple(reports)))


def _count(report: DatasetReport, example: Example) -> None:
    report.tokens += len(example)
    report.trained_tokens += example.trained


def _fitted(examples: Sequence[Example], length: int, overlong: Overlong, report: DatasetReport) -> list[Example]:
    """The examples of one row that are left within `length`; counts the row."""
    fitting = [example for example in examples if len(example) <= length or overlong == "truncate"]
    kept = [example for example in (example.cut(length) for example in fitting) if example.trained]
    report.overlong += len(fitting) < len(examples)
    report.truncated += bool(kept) and any(len(example) > length for example in fitting)
    report.untrained += not kept and len(fitting) == len(examples)
    return kept


def _fitted_pair(pair: Pair, length: int, overlong: Overlong, report: DatasetReport) -> Pair | None:
    too_long = max(len(pair.chosen), len(pair.rejected)) > length
    if too_long and overlong == "filter":
        report.overlong += 1
        return None
    fitted = Pair(pair.chosen.cut(length), pair.rejected.cut(length))
    # one side that lost its whole answer would be compared by nothing
    if fitted.chosen.trained == 0 or fitted.rejected.trained == 0:
        report.untrained += 1
        return None
    report.truncated += too_long
    return fitted


class _Encoder:
    """Units into examples, a batch of rows at a time so that the tokenizer gets many texts at once."""

    def __init__(self, tokens: Tokens, masking: _Masking) -> None:
        self._tokens = tokens
        self._chat = ChatEncoder(tokens)
        self._masking = masking

    def encode(
        self, source: Source, report: DatasetReport, units: Callable[[dict[str, object], str], Sequence[Unit]], *, whole: bool = False
    ) -> Iterator[tuple[str, list[list[Example]]]]:
        """For each usable row, where it stands and the examples of each of its units. Rows that are not usable are counted in `report`.

        Args:
            units: makes the units of a row.
            whole: a unit must come out as exactly one example.
        """
        rows = iter(enumerate(source))
        while batch := list(islice(rows, BATCH)):
            report.rows += len(batch)
            planned = []
            for index, row in batch:
                where = source.where(index)
                try:
                    planned.append((where, [(unit, self._plan(unit)) for unit in units(row, where)]))
                except UnusableRow as error:
                    report.add_unusable(where, str(error))
            self._tokens.prefetch(text for _, row_units in planned for unit, plan in row_units for text in _texts(unit, plan))
            for where, row_units in planned:
                try:
                    encoded = [self._examples(unit, plan) for unit, plan in row_units]
                    if whole and any(len(examples) > 1 for examples in encoded):
                        raise UnusableRow("the chat template rewrites earlier turns of an answer, so that it is not one sequence")
                except UnusableRow as error:
                    report.add_unusable(where, str(error))
                    continue
                if not all(encoded):
                    report.untrained += 1
                    continue
                yield where, encoded

    def _plan(self, unit: Unit) -> list[Rendering]:
        if not isinstance(unit, Conversation) or (first := self._first_turn(unit)) is None:
            return []
        return self._chat.plan(unit, first)

    def _first_turn(self, unit: Conversation) -> int | None:
        """The first message that may be trained where only turns of the assistant are; None where more is trained than those."""
        prompted = unit.completion_start > 0 and self._masking.completion_only
        if not self._masking.assistant_only:
            return None
        return unit.completion_start if prompted else 0

    def _examples(self, unit: Unit, plan: Sequence[Rendering]) -> list[Example]:
        tokens = self._tokens
        if isinstance(unit, Conversation):
            if self._first_turn(unit) is None:
                answered = unit.completion_start > 0 and self._masking.completion_only
                return [self._chat.after_prompt(unit) if answered else self._chat.everything(unit)]
            examples = self._chat.encode(unit, plan)
            if any(message["role"] == "user" for message in unit.messages) and any(e.trained >= len(e) - 1 for e in examples):
                raise UnusableRow("every token would be trained, the user's too: the chat template tells no turns apart")
            return examples
        if isinstance(unit, PromptCompletion):
            prefix, prompt = tokens.plain(unit.prompt)
            first, rest = tokens.join(prompt, unit.completion)
            start = len(prefix) + len(first) if self._masking.completion_only else 0
        else:
            prefix, text = tokens.plain(unit.text)
            first, rest, start = [], tokens.ids(text), 0
        ids = [*prefix, *first, *rest]
        if ids[-1:] != [tokens.eos_id]:
            ids.append(tokens.eos_id)
        return [make_example(ids, [(start, len(ids))])]


def _texts(unit: Unit, plan: Sequence[Rendering]) -> list[str]:
    """What will be tokenised for a unit."""
    if isinstance(unit, Conversation):
        return [rendering.text for rendering in plan]
    if isinstance(unit, PromptCompletion):
        return [unit.prompt, unit.prompt + unit.completion]
    return [unit.text]
