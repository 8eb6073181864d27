"""The process that talks to wandb or TensorBoard: ``python worker.py wandb|tensorboard``.

Reads JSON lines from its standard input until that is closed: options first, then ``{"step": ..., "time": ..., "metrics": {...}}``.
What goes wrong is one line on the standard output. It runs as a file, not as a module of the package, so that it needs nothing but
the client.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

ORPHAN_SECONDS = 120.0

Log = Callable[[int, float, dict[str, float]], None]
Close = Callable[[], None]


def open_wandb(options: dict[str, Any]) -> tuple[Log, Close]:
    if options["offline"]:
        os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "surogate-rl"),
        name=options["name"],
        id=options["run_id"],
        resume="allow",
        dir=options["directory"],
        config=options["config"],
    )

    def log(step: int, wall_time: float, metrics: dict[str, float]) -> None:
        run.log(metrics, step=step)

    return log, run.finish


def open_tensorboard(options: dict[str, Any]) -> tuple[Log, Close]:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(os.path.join(options["directory"], "tensorboard"))
    if options["resume_step"]:
        # Points from here on, of the broken run, are dropped by TensorBoard.
        writer.add_event(Event(step=options["resume_step"] + 1, session_log=SessionLog(status=SessionLog.START)))

    def log(step: int, wall_time: float, metrics: dict[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer.add_event(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))
        writer.flush()

    return log, writer.close


def lines(stream: TextIO) -> Iterator[dict[str, Any]]:
    for line in stream:
        yield json.loads(line)


def watch_parent(parent: int) -> None:
    """A run that was killed cannot end a client that hangs: the client then has this long to send what it holds."""
    while os.getppid() == parent:
        time.sleep(2.0)
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


def main() -> int:
    threading.Thread(target=watch_parent, args=(os.getppid(),), daemon=True).start()
    # What the client prints goes to the log file; the real standard output is for one line about what went wrong.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        messages = lines(sys.stdin)
        options = next(messages)
        log, close = {"wandb": open_wandb, "tensorboard": open_tensorboard}[sys.argv[1]](options)
        for message in messages:
            log(message["step"], message["time"], {name: value for name, value in message["metrics"].items() if value is not None})
        close()
    except Exception as error:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        print(f"failed: {type(error).__name__}: {first}", file=answers, flush=True)
        import traceback

        traceback.print_exc(file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
