"""The command line: ``surogate-rl sft|dpo|grpo CONFIG``, ``surogate-rl report DIR``, ``surogate-rl vllm-server``.

Exit codes: 0 done, 1 failed, 2 the configuration or another input is wrong, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from surogate_rl import __version__
from surogate_rl.console import is_input_error, newest_checkpoint, print_error, print_message, print_summary, print_warning

if TYPE_CHECKING:
    from surogate_rl.config import Command, TrainConfig

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(
    name="surogate-rl",
    help="Post-training of language models: SFT, DPO and GRPO from one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="The YAML file; docs/config.md lists every key.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the file, e.g. rollouts.num_generations=16; may be repeated."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration, memory plan and steps; load nothing.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def _version(value: bool) -> None:
    if value:
        print(f"surogate-rl {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    """Post-training of language models: SFT, DPO and GRPO from one YAML file."""


@app.command()
def sft(config: ConfigArgument, set_: SetOption = None, dry_run: DryRunOption = False, debug: DebugOption = False) -> None:
    """Supervised fine-tuning."""
    _run("sft", config, set_ or [], dry_run, debug)


@app.command()
def dpo(config: ConfigArgument, set_: SetOption = None, dry_run: DryRunOption = False, debug: DebugOption = False) -> None:
    """Direct preference optimisation."""
    _run("dpo", config, set_ or [], dry_run, debug)


@app.command()
def grpo(config: ConfigArgument, set_: SetOption = None, dry_run: DryRunOption = False, debug: DebugOption = False) -> None:
    """Reinforcement learning with group-relative advantages."""
    _run("grpo", config, set_ or [], dry_run, debug)


@app.command()
def report(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's output_dir.")],
    debug: DebugOption = False,
) -> None:
    """Write DIR/report.html from the metrics and rollouts of a run."""

    def act() -> None:
        from surogate_rl.report import write_report

        print(write_report(directory))

    _guard(act, debug, None)


@app.command("vllm-server")
def vllm_server(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to serve; runs name it in rollouts.vllm.base_url.")
    ] = "127.0.0.1:8100",
    debug: DebugOption = False,
) -> None:
    """Serve vLLM to runs on this or other machines, one run at a time. The run says which model; this Python needs vLLM."""

    def act() -> None:
        from surogate_rl.rollouts.engines.vllm.process import replace_by_server

        replace_by_server(listen)

    _guard(act, debug, None)


def _run(command: Command, path: str, overrides: list[str], dry_run: bool, debug: bool) -> None:
    output_dir: list[str] = []

    def act() -> None:
        from surogate_rl.config import ConfigWarning, load_config

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConfigWarning)
            config: TrainConfig = load_config(path, command, overrides, planning=dry_run)
        for warning in caught:
            print_warning(str(warning.message))
        if dry_run:
            _print_plan(config, command)
            return
        output_dir.append(config.output_dir)
        _quiet_libraries()
        print_summary(_trainer(command)(config))

    _guard(act, debug, output_dir)


def _trainer(command: Command) -> Callable[[Any], Any]:
    from surogate_rl import trainers

    run: Callable[[Any], Any] = getattr(trainers, f"run_{command}")
    return run


def _print_plan(config: TrainConfig, command: Command) -> None:
    """YAML that loads again; the plan stands in comments."""
    from surogate_rl.config import dump_config
    from surogate_rl.trainers import plan

    lines = plan(config).lines
    print(f"# surogate-rl {__version__} {command}, every key with its value")
    print(dump_config(config), end="")
    print("#")
    for line in lines:
        print(f"# {line}".rstrip())


class _ToStderr(logging.StreamHandler[TextIO]):
    """Looks `sys.stderr` up for every record: while the live display is shown, its stand-in keeps lines and display apart."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _Lowercase(logging.Formatter):
    """``warning: ...``, as the other lines begin."""

    def format(self, record: logging.LogRecord) -> str:
        record = copy.copy(record)
        record.levelname = record.levelname.lower()
        return super().format(record)


def _quiet_libraries() -> None:
    """Progress bars of the libraries are for terminals."""
    root = logging.getLogger()
    if not any(isinstance(handler, _ToStderr) for handler in root.handlers):
        handler = _ToStderr()
        handler.setFormatter(_Lowercase("%(levelname)s: %(message)s"))
        root.addHandler(handler)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def _guard(act: Callable[[], None], debug: bool, output_dir: list[str] | None) -> None:
    """Runs a command; what goes wrong becomes sentences and an exit code."""
    try:
        act()
    except KeyboardInterrupt as error:
        print_message(_interrupted(str(error), output_dir))
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output went away (such as `| head`): nothing is left to say, not even by the interpreter's own flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None
    except (typer.Exit, SystemExit):
        raise
    except BaseException as error:
        if isinstance(error, BaseExceptionGroup) and error.subgroup(KeyboardInterrupt) is not None:
            print_message(_interrupted("", output_dir))
            raise typer.Exit(INTERRUPTED) from None
        print_error(error, debug=debug)
        raise typer.Exit(BAD_INPUT if is_input_error(error) else FAILED) from None


def _interrupted(message: str, output_dir: list[str] | None) -> str:
    """What a Ctrl-C left."""
    if message:
        return message
    if not output_dir:
        return "stopped; nothing was started"
    newest = newest_checkpoint(output_dir[0])
    if newest is None:
        return "stopped; no checkpoint was saved yet"
    return f"stopped at once; the newest checkpoint is {newest}; go on with --set resume=auto"


def main() -> None:
    """Entry point of the ``surogate-rl`` script."""
    app()


if __name__ == "__main__":
    main()
