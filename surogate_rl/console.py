"""What a run shows: live progress on a terminal, plain lines without one, errors as sentences."""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from surogate_rl.errors import InputError, RunError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

# What is shown of a step, in this order; everything is in metrics.jsonl.
SHOWN = (
    "loss",
    "reward",
    "reward_std",
    "rewards/accuracies",
    "rewards/margins",
    "kl",
    "entropy",
    "completions/mean_length",
    "completions/clipped_ratio",
    "completions/unscored",
    "skipped_steps",
    "grad_norm",
    "learning_rate",
)
# Only worth a place if there were some.
_TROUBLE = ("completions/unscored", "skipped_steps")
# What is shown of an evaluation, by the name after eval_ (or its beginning, if it ends in @).
_EVALUATION_SHOWN = (
    "loss",
    "reward",
    "mean@",
    "pass@",
    "rewards/accuracies",
    "rewards/margins",
    "completions/mean_length",
)
_SHORT = {
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "clipped",
    "completions/unscored": "unscored",
    "skipped_steps": "skipped",
    "learning_rate": "lr",
}


def format_number(value: float) -> str:
    """Four significant digits, no needless zeros: ``0.5123``, ``1.5e-05``, ``12345``, ``nan``."""
    if not math.isfinite(value):
        return str(float(value))
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.2e}"
    return f"{value:.0f}" if size >= 1e4 else f"{value:.4g}"


def format_seconds(seconds: float) -> str:
    """``0:42``, ``12:05``, ``3:07:00``, ``2d 01:00:00``."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shown_names(values: Mapping[str, float]) -> list[str]:
    """The metrics of a step that are shown, in their order."""
    return [name for name in SHOWN if name in values and (values[name] or name not in _TROUBLE)]


def evaluation_rank(name: str) -> int | None:
    """The place of an evaluation's metric among those that are shown, from 0; None: it is only in the file."""
    bare = name[5:] if _is_evaluation(name) else name
    if bare == "mean@1":  # of one completion for each prompt it is the reward
        return None
    for rank, shown in enumerate(_EVALUATION_SHOWN):
        if bare == shown or (shown.endswith("@") and bare.startswith(shown)):
            return rank
    return None


def shown_evaluation(values: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an evaluation that are shown, what matters most first."""
    ranked = [(rank, name) for name in values if (rank := evaluation_rank(name)) is not None]
    return {name: values[name] for _, name in sorted(ranked)}


class Progress:
    """Shows where a run is. Never raises: a closed terminal must not end a run.

    Args:
        stream: where to; default: standard error, so that standard output stays the caller's.
        live: redraw in place; default: when the stream is a terminal that can, and not in CI.
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        from rich.console import Console

        self._stream = stream if stream is not None else sys.stderr
        self._console: Console = Console(file=self._stream, highlight=False, soft_wrap=True)
        can = self._console.is_terminal and not self._console.is_dumb_terminal and not os.environ.get("CI")
        self._is_live = can if live is None else live
        self._live: Live | None = None
        self._command, self._total, self._first, self._step = "", 0, 0, 0
        self._begin = time.perf_counter()
        self._values: dict[str, float] = {}
        self._evaluation: dict[str, float] = {}
        self._broken = False

    def start(self, command: str, total: int, done: int = 0) -> None:
        """``total`` steps, of which ``done`` were done by an earlier process."""
        self._command, self._total, self._first, self._step = command, total, done, done
        self._begin = time.perf_counter()
        if self._is_live:
            from rich.live import Live

            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4, redirect_stdout=sys.stdout.isatty())
            self._safely(self._live.start)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """New values after ``step``; those of an evaluation (all named ``eval_...`` or ``eval/...``) get a line of their own."""
        evaluation = {name: value for name, value in values.items() if _is_evaluation(name)}
        training = {name: value for name, value in values.items() if name not in evaluation}
        self._step = max(self._step, step)
        self._values.update(training)
        self._evaluation.update(evaluation)
        if self._live is not None:
            if evaluation:
                self.note(self._evaluation_line(step, evaluation))
            return
        if training:
            self._print(self.line(step, training))
        if evaluation:
            self._print(self._evaluation_line(step, evaluation))

    def note(self, message: str) -> None:
        """A line above the progress."""
        self._print(message)

    def stop(self) -> None:
        """Ends the redrawing; may be called twice."""
        if self._live is not None:
            self._safely(self._live.stop)
            self._live = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def line(self, step: int, values: Mapping[str, float]) -> str:
        """One plain line: ``step 10/300  loss 1.25  reward 0.5  lr 1e-06  850 tok/s  eta 3:21``."""
        parts = [f"step {step:>{len(str(self._total))}}/{self._total}"]
        parts += [f"{_SHORT.get(name, name)} {format_number(values[name])}" for name in shown_names(values)]
        if "tokens_per_second" in values:
            parts.append(f"{format_number(round(values['tokens_per_second']))} tok/s")
        if step < self._total:
            parts.append(f"eta {format_seconds(self._remaining())}")
        return "  ".join(parts)

    def _evaluation_line(self, step: int, values: Mapping[str, float]) -> str:
        shown = shown_evaluation(values) or values
        short = {name: _SHORT.get(name[5:], name[5:]) for name in shown}
        return f"eval at step {step}  " + "  ".join(f"{short[name]} {format_number(value)}" for name, value in shown.items())

    def _remaining(self) -> float:
        done = self._step - self._first
        return (time.perf_counter() - self._begin) / done * (self._total - self._step) if done > 0 else math.inf

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = Table.grid(padding=(0, 2))
        spent = format_seconds(time.perf_counter() - self._begin)
        rate = self._values.get("tokens_per_second")
        head.add_row(
            Text(self._command, style="bold"),
            f"{self._step}/{self._total}",
            ProgressBar(total=max(self._total, 1), completed=self._step, width=30),
            f"{spent} < {format_seconds(self._remaining()) if self._step < self._total else '0:00'}",
            f"{format_number(round(rate))} tok/s" if rate is not None and math.isfinite(rate) else "",
        )
        body = Table.grid(padding=(0, 2))
        cells = [
            Text.assemble((_SHORT.get(name, name) + " ", "dim"), format_number(self._values[name])) for name in shown_names(self._values)
        ]
        for start in range(0, len(cells), 6):
            body.add_row(*cells[start : start + 6])
        return Group(head, body)

    def _print(self, text: str) -> None:
        self._safely(lambda: self._console.print(text, markup=False, highlight=False))

    def _safely(self, act: Any) -> None:
        if self._broken:
            return
        try:
            act()
        except (OSError, ValueError):
            # The terminal or pipe is gone. Metrics are still in the file.
            self._broken = True


def _is_evaluation(name: str) -> bool:
    return name.startswith(("eval_", "eval/"))


def print_summary(result: Any, stream: TextIO | None = None) -> None:
    """What a run left: steps, the last value of each metric shown, where things are. ``result`` is a `RunResult`."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream if stream is not None else sys.stderr, highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2), pad_edge=False)
    table.add_row("steps", str(result.steps))
    for name in shown_names(result.metrics):
        table.add_row(name, format_number(result.metrics[name]))
    for name, value in shown_evaluation(result.evaluation).items():
        table.add_row(name, format_number(value))
    table.add_row("model", str(result.final_model))
    report = Path(result.output_dir) / "report.html"
    table.add_row("report" if report.exists() else "metrics", str(report if report.exists() else Path(result.output_dir) / "metrics.jsonl"))
    console.print(table)


def print_warning(message: str, stream: TextIO | None = None) -> None:
    _write(f"warning: {message}", stream)


def print_message(message: str, stream: TextIO | None = None) -> None:
    _write(message, stream)


def print_error(error: BaseException, *, debug: bool = False, stream: TextIO | None = None) -> None:
    """The sentences of the error, without a traceback unless ``debug``. A configuration's errors stand one a line as they are."""
    lines = getattr(error, "lines", None)
    if debug:
        _write("".join(traceback.format_exception(error)).rstrip(), stream)
    if isinstance(lines, list):
        _write("\n".join(map(str, lines)), stream)
        return
    shown = first_leaf(error)
    text = str(shown).strip() or type(shown).__name__
    if isinstance(shown, InputError | RunError | MemoryError):
        _write(f"error: {text}", stream)
        return
    place = _place(shown)
    _write(f"error: {type(shown).__name__}: {text}" + (f" ({place})" if place else ""), stream)
    if not debug:
        _write("run again with --debug for the traceback", stream)


def _place(error: BaseException) -> str:
    """``file.py:12, in function``: the innermost place in the user's own code, such as an objective; else the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = tuple({sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(__file__))})
    own = [frame for frame in frames if not os.path.realpath(frame.filename).startswith(installed) and not frame.filename.startswith("<")]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"


def is_input_error(error: BaseException) -> bool:
    """Whether what the user gave is to blame: exit code 2 instead of 1."""
    return isinstance(first_leaf(error), InputError)


def first_leaf(error: BaseException) -> BaseException:
    """The first error inside of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    found: Sequence[Path] = sorted(path for path in (Path(output_dir) / "checkpoints").glob("step-*") if path.is_dir())
    return max(found, key=lambda path: (len(path.name), path.name), default=None)


def _write(text: str, stream: TextIO | None) -> None:
    target = stream if stream is not None else sys.stderr
    try:
        print(text, file=target, flush=True)
    except (OSError, ValueError):
        return
