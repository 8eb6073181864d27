"""What became of the rows: counts that a run prints before step 0, and the errors that name a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from surogate_rl.batch import IntArray
from surogate_rl.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

MAX_REASONS = 3
PROMPT_LIMIT = "rollouts.max_prompt_length"


class DataError(InputError):
    """Data that cannot be used as it is; says which data set, which row, and what to do."""


class MissingData(DataError, FileNotFoundError):
    """There is no such file or directory."""


class UnusableRow(Exception):
    """A row that cannot be rendered or masked exactly; it is dropped and counted, and is an error only if most rows are like that."""


def require_embedded(ids: Sequence[int] | IntArray, vocab: int | None, where: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises DataError if a token has no row in the model's embedding of `vocab` rows (None: not known). A tokenizer has such tokens if
    some were added to it, or if it is another model's."""
    highest = int(np.asarray(ids).max(initial=0))
    if vocab is not None and highest >= vocab:
        raise DataError(
            f"{where}: the token {tokenizer.convert_ids_to_tokens(highest)!r} has id {highest}, but the model has ids below {vocab} only; "
            "use the tokenizer that belongs to the model (`tokenizer`), or take the token out of the data and the chat template"
        )


@dataclass
class DatasetReport:
    """Counts of one data set. Rows end as kept, overlong, untrained or unusable; the other counts overlap with kept.

    Attributes:
        path: as in the configuration.
        type: the type of its rows, given or recognised.
        rows: rows read.
        kept: rows that gave at least one item.
        items: examples, pairs or tasks; more than `kept` where conversations were split.
        overlong: rows dropped because they were longer than the limit; of a split conversation, in part or as a whole.
        truncated: rows cut to the limit and kept.
        untrained: rows dropped because no token would have been trained.
        unusable: rows dropped because the chat template renders them in a way that cannot be masked exactly.
        split: conversations that became several examples, because the template (or a merge of tokens) changes earlier turns.
        identical_pairs: preference pairs whose sides are the same tokens; they are kept and teach nothing.
        tokens, trained_tokens: over all items; for tasks, prompt tokens and 0.
        reasons: why rows were unusable, the first few.
    """

    path: str
    type: str
    rows: int = 0
    kept: int = 0
    items: int = 0
    overlong: int = 0
    truncated: int = 0
    untrained: int = 0
    unusable: int = 0
    split: int = 0
    identical_pairs: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    reasons: list[str] = field(default_factory=list)

    def add_unusable(self, where: str, reason: str) -> None:
        self.unusable += 1
        if len(self.reasons) < MAX_REASONS:
            self.reasons.append(f"{where}: {reason}")

    def __str__(self) -> str:
        said = [f"{self.path} ({self.type}): {self.rows} row{'' if self.rows == 1 else 's'}, {self.kept} kept"]
        if self.items != self.kept:
            said.append(
                f"{self.items} examples ({self.split} conversations were split, since their earlier turns look otherwise once more follows)"
            )
        for count, text in (
            (self.overlong, "dropped as too long"),
            (self.truncated, "truncated"),
            (self.untrained, "dropped because no token would be trained"),
            (self.unusable, "dropped because the chat template does not render them exactly"),
            (self.identical_pairs, f"pair{'' if self.identical_pairs == 1 else 's'} with identical sides, which teach nothing"),
        ):
            if count:
                said.append(f"{count} {text}")
        said.append(f"{self.tokens} tokens" + (f", {self.trained_tokens} of them trained" if self.trained_tokens else ""))
        return "; ".join(said) + "".join(f"\n    {reason}" for reason in self.reasons)


@dataclass(frozen=True)
class DataReport:
    """Counts by data set; the properties add them up."""

    datasets: tuple[DatasetReport, ...]

    def _sum(self, name: str) -> int:
        return sum(getattr(report, name) for report in self.datasets)

    @property
    def rows(self) -> int:
        return self._sum("rows")

    @property
    def kept(self) -> int:
        return self._sum("kept")

    @property
    def overlong(self) -> int:
        return self._sum("overlong")

    @property
    def truncated(self) -> int:
        return self._sum("truncated")

    @property
    def untrained(self) -> int:
        return self._sum("untrained")

    @property
    def unusable(self) -> int:
        return self._sum("unusable")

    @property
    def split(self) -> int:
        return self._sum("split")

    @property
    def identical_pairs(self) -> int:
        return self._sum("identical_pairs")

    @property
    def tokens(self) -> int:
        return self._sum("tokens")

    @property
    def trained_tokens(self) -> int:
        return self._sum("trained_tokens")

    def __str__(self) -> str:
        return "\n".join(str(report) for report in self.datasets)


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """What was loaded, in the order of the data sets and their rows, and the counts."""

    items: Sequence[T]
    report: DataReport


def require_usable(report: DatasetReport, limit_name: str, limit: int | None, kind: str) -> None:
    """Raises DataError if nothing is left of a data set, or if most of its rows would train nothing.

    Args:
        limit_name: the configuration key of the length limit.
        kind: the word for a row: example, pair or prompt.
    """
    if report.rows == 0:
        raise DataError(f"{report.path}: the data set is empty (0 rows); check the path and the split")
    lost = report.untrained + report.unusable
    if 2 * lost > report.rows:
        detail = f"{report.untrained} of {report.rows} {'has' if report.untrained == 1 else 'have'} no token to train" + (
            f", {_are(report.unusable)} not rendered exactly by the chat template" if report.unusable else ""
        )
        reasons = "".join(f"\n    {reason}" for reason in report.reasons)
        raise DataError(
            f"{report.path}: most rows are lost: {detail}; raise {limit_name} (now {limit}) if answers were cut off, check that "
            f"`type` ({report.type}) and `columns` fit the data, or set a chat_template that suits it{reasons}"
        )
    if report.kept == 0:
        raise DataError(
            f"{report.path}: no {kind} is left of {report.rows} row{'s' if report.rows > 1 else ''}: "
            f"{_are(report.overlong)} longer than {limit_name} ({limit})"
            + (f", {report.untrained} with no token to train" if report.untrained else "")
            + (f", {_are(report.unusable)} not rendered exactly by the chat template" if report.unusable else "")
            + f"; raise {limit_name}"
            + (" or set overlong: truncate" if limit_name == "sequence_len" else "")
            + (", which is by default what sequence_len leaves beside max_completion_length" if limit_name == PROMPT_LIMIT else "")
        )


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"
