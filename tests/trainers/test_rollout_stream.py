"""Whole runs that sample ahead of the learner, or pass over groups that teach nothing."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import surogate_rl
from surogate_rl.config import parse_config
from surogate_rl.errors import InputError
from surogate_rl.learner import Learner
from surogate_rl.rollouts.engines.native import NativeEngine
from surogate_rl.rollouts.stream import Batch, RolloutStream
from surogate_rl.trainers.plan import stream_lines
from surogate_rl.trainers.sampling import Rollouts

from .outputs import lines, rows_by_step, same, weights

Make = Callable[..., dict[str, Any]]


def rollouts(**changes: Any) -> dict[str, Any]:
    return {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 8, "max_sequences": 16} | changes


def sparse(base: Make, **changes: Any) -> dict[str, Any]:
    config = base("grpo", **changes)
    config["rewards"] = [f"{Path(__file__).parent / 'digits.py'}:first_digit"]
    return config


# Staleness --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [{}, {"num_iterations": 2, "num_minibatches": 2}, {"loss_type": "rloo", "beta": 0.1}])
def test_ahead_of_the_learner_ages_are_measured_bounded_and_corrected(
    base: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: dict[str, Any]
) -> None:
    batch = Rollouts.batch

    def late(self: Rollouts, step: int) -> Batch:
        """In every second step the engine has sampled all that it may before the learner begins to learn."""
        found = batch(self, step)
        while step % 2 and self._stream is not None and self._stream.under_way:
            time.sleep(0.001)
        return found

    monkeypatch.setattr(Rollouts, "batch", late)
    result = surogate_rl.grpo(base("grpo", max_steps=12, rollouts=rollouts(max_staleness=1, oversample=2), loss=loss))
    first, *rest = result.history
    assert first["rollouts/staleness_max"] == 0
    assert first["sampling/sampling_logp_difference/max"] < 1e-4
    assert max(line["rollouts/staleness_max"] for line in rest) == 1
    assert all(line["rollouts/dropped_stale"] == 0 for line in rest)
    aged = [line for line in rest if line["rollouts/staleness_mean"] > 0.5]
    assert aged
    assert all(line["sampling/sampling_logp_difference/max"] > 1e-3 for line in aged)
    assert all(line["sampling/kl"] > 0 for line in aged)
    assert all(line["grad_norm"] > 0 for line in result.history)
    # the same prompts in the same order as on policy
    plain = surogate_rl.grpo(base("grpo", max_steps=12, rollouts=rollouts(), loss=loss, output_dir=str(tmp_path / "plain")))
    assert [[row["task"] for row in step] for step in rows_by_step(result.output_dir)] == [
        [row["task"] for row in step] for step in rows_by_step(plain.output_dir)
    ]


@pytest.mark.filterwarnings("ignore:loss.mismatch_cap has no effect")
def test_stale_completions_are_weighed_by_proximal_over_behaviour(base: Make) -> None:
    """A cap just above 0 truncates every weight to it: nearly nothing is left of the gradient. On policy there is no weight to truncate."""
    caps = {"mismatch_cap": 1e-6}
    ahead = surogate_rl.grpo(base("grpo", rollouts=rollouts(max_staleness=1), loss=caps | {"mismatch": "auto"}))
    assert all(line["grad_norm"] < 1e-4 for line in ahead.history)
    assert all(line["sampling/clip_fraction"] == 1.0 for line in ahead.history)
    on_policy = surogate_rl.grpo(base("grpo", rollouts=rollouts(), loss=caps, output_dir=str(ahead.output_dir) + "-0"))
    assert all(line["grad_norm"] > 1e-2 for line in on_policy.history)


class Trace:
    """When the engine decodes and when the learner does what: (what, begin, end), in seconds.

    Neither can leave the other behind on any machine: while the learner learns, the engine takes two steps for each forward pass, one
    before and one after that has begun, as long as it has something to do and is not paused.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self.stream: RolloutStream | None = None
        self.engine: NativeEngine | None = None
        self.learning = False
        self.steps = self.most = 0  # of the engine: taken, and that it may have taken
        collect, weights_changed = RolloutStream.collect, Rollouts.weights_changed

        async def begin(stream: RolloutStream, step: int) -> Batch:
            batch = await collect(stream, step)
            self.stream, self.learning, self.most = stream, True, self.steps
            return batch

        def end(rollouts: Rollouts, version: int) -> None:
            self.learning = False
            weights_changed(rollouts, version)

        monkeypatch.setattr(RolloutStream, "collect", begin)
        monkeypatch.setattr(Rollouts, "weights_changed", end)
        for cls, name, what in (
            (NativeEngine, "_step", "decode"),
            (Learner, "step", "update"),
            (Learner, "forward", "forward"),
            (Learner, "backward", "backward"),
        ):
            monkeypatch.setattr(cls, name, self._wrap(getattr(cls, name), what))

    def _wrap(self, method: Callable[..., Any], what: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if what == "decode":
                self.engine = args[0]
                while self.learning and self.steps >= self.most and not self._held:
                    time.sleep(0.0002)
            elif what == "forward":
                assert self.stream is not None
                next_step = self.steps + 1
                self.most = next_step + 1
                while self.steps < next_step and self.stream.under_way > 0 and not self._held:
                    time.sleep(0.0002)
            begin = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.spans.append((what, begin, time.perf_counter()))
                self.steps += what == "decode"

        return wrapped

    @property
    def _held(self) -> bool:
        return self.engine is not None and (self.engine._paused or self.engine._closed)

    def of(self, *what: str) -> list[tuple[float, float]]:
        return [(begin, end) for kind, begin, end in self.spans if kind in what]


@pytest.mark.parametrize("minibatches", [1, 4])
def test_nothing_is_decoded_while_an_update_writes_but_between_passes(
    base: Make, monkeypatch: pytest.MonkeyPatch, minibatches: int
) -> None:
    trace = Trace(monkeypatch)
    config = base(
        "grpo",
        max_steps=8,
        sequence_len=64,
        per_device_train_batch_size=1,  # many passes
        rollouts=rollouts(max_staleness=1, oversample=4, max_completion_length=40, max_sequences=4),
        loss={"num_minibatches": minibatches},
    )
    result = surogate_rl.grpo(config)
    updates, decodes, passes = trace.of("update"), trace.of("decode"), trace.of("forward", "backward")
    assert len(updates) == 8 * minibatches
    overlapping = [(u, d) for u in updates for d in decodes if d[0] < u[1] and u[0] < d[1]]
    assert overlapping == []
    # from the first update of a step until the engine has the new version there is none either
    for step in range(8):
        first, last = updates[step * minibatches][0], updates[step * minibatches + minibatches - 1][1]
        assert not [d for d in decodes if d[0] < last and first < d[1]]
    # but it goes on while the learner is at its passes
    learning = [(passes[0][0], passes[-1][1])]
    assert [d for d in decodes if d[0] > learning[0][0] and d[1] < learning[0][1]]
    between = sum(any(a[1] <= d[1] <= b[0] for d in decodes) for a, b in itertools.pairwise(passes))
    assert between > 0
    # completions that lived through an update: their tokens are of several versions, none too old
    assert any(0 < line["rollouts/staleness_mean"] < 1 for line in result.history)


def test_the_clocks_of_a_step_add_up(base: Make, tmp_path: Path) -> None:
    for name, staleness in (("on", 0), ("ahead", 1)):
        result = surogate_rl.grpo(base("grpo", rollouts=rollouts(max_staleness=staleness), output_dir=str(tmp_path / name)))
        for line in result.history:
            assert line["time/wait"] + line["time/learn"] + line["time/sync"] == pytest.approx(line["step_time"])
            assert line["time/generate"] + line["time/engine_idle"] == pytest.approx(line["step_time"])
            assert min(line[f"time/{what}"] for what in ("wait", "learn", "sync", "generate", "engine_idle")) >= 0
            if staleness == 0:
                assert line["time/generate"] <= line["time/wait"]  # it never generates while the learner learns


# Dynamic sampling -------------------------------------------------------------------------------------------------------------------


def test_every_trained_group_has_signal_and_what_was_passed_over_is_counted(base: Make) -> None:
    settings = rollouts(dynamic_sampling={"enabled": True, "max_rounds": 20})
    result = surogate_rl.grpo(sparse(base, max_steps=6, rollouts=settings))
    used = 0
    for line, step in zip(result.history, rows_by_step(result.output_dir), strict=True):
        groups = [[row["reward"] for row in step[i : i + 4]] for i in range(0, 16, 4)]
        assert len(step) == 16
        assert all(min(group) != max(group) for group in groups)
        assert line["frac_reward_zero_std"] == 0
        assert line["dynamic_sampling/missing_groups"] == 0
        used += 4 + int(line["dynamic_sampling/discarded_groups"])
        assert line["epoch"] == pytest.approx(used / 64)
    assert used > 24


def test_a_limit_that_is_reached_trains_what_there_is(base: Make) -> None:
    def constant(completion: str) -> float:
        return 0.5

    config = base("grpo", max_steps=2, rollouts=rollouts(dynamic_sampling={"enabled": True, "max_rounds": 2}))
    config["rewards"] = []
    result = surogate_rl.grpo(config, rewards=[constant])
    assert all(line["dynamic_sampling/rounds"] == 2 for line in result.history)
    assert all(line["dynamic_sampling/missing_groups"] == 4 for line in result.history)
    assert all(line["grad_norm"] == 0 for line in result.history)
    assert rows_by_step(result.output_dir) == []


def test_nothing_but_failed_rewards_ends_the_run_under_dynamic_sampling_too(base: Make) -> None:
    def broken(completion: str) -> float:
        raise RuntimeError("no")

    config = base("grpo", max_steps=50, rollouts=rollouts(dynamic_sampling={"enabled": True, "max_rounds": 2}))
    config["rewards"] = []
    with pytest.raises(RuntimeError, match="5 steps in a row"):
        surogate_rl.grpo(config, rewards=[broken])


@pytest.mark.parametrize("oversample", [0, 6])
def test_on_policy_a_resumed_run_ends_as_an_unbroken_one(base: Make, tmp_path: Path, oversample: int) -> None:
    settings = rollouts(oversample=oversample, dynamic_sampling={"enabled": True, "max_rounds": 8})
    common: dict[str, Any] = {"max_steps": 6, "rollouts": settings}
    whole = surogate_rl.grpo(sparse(base, output_dir=str(tmp_path / "whole"), **common))
    plain = settings | {"oversample": 0}
    without = surogate_rl.grpo(sparse(base, output_dir=str(tmp_path / "without"), **(common | {"rollouts": plain})))
    assert same(weights(whole.final_model), weights(without.final_model))  # spares change nothing
    broken = sparse(base, output_dir=str(tmp_path / "broken"), save_steps=2, save_total_limit=None, **common)
    surogate_rl.grpo(broken)
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "step-00000006")
    shutil.rmtree(tmp_path / "broken" / "final")
    resumed = surogate_rl.grpo(broken | {"resume": "auto"})
    assert same(weights(whole.final_model), weights(resumed.final_model))
    assert rows_by_step(tmp_path / "whole") == rows_by_step(tmp_path / "broken")
    for a, b in zip(lines(tmp_path / "whole"), lines(tmp_path / "broken"), strict=True):
        for name in ("epoch", "reward", "loss", "dynamic_sampling/discarded_groups", "dynamic_sampling/reward"):
            assert a[name] == b[name]


def test_a_dry_run_shows_the_schedule(base: Make) -> None:
    def said(**settings: Any) -> list[str]:
        return stream_lines(parse_config(base("grpo", rollouts=rollouts(**settings)), "grpo"))

    assert said() == []
    assert said(max_staleness=2, oversample=3) == [
        "while it learns, the next 2 steps may be sampled: at most 8 groups (11 while it waits for its own)",
        "no token that it trains is more than 2 version(s) old (max_staleness)",
    ]
    assert said(oversample=2, dynamic_sampling={"enabled": True, "max_rounds": 3}) == [
        "with 2 spare group(s) beside them",
        "groups without signal are replaced, up to 12 groups sampled for a step (dynamic_sampling)",
    ]


def test_a_dry_run_says_what_is_carried_over(base: Make) -> None:
    def said(**settings: Any) -> list[str]:
        return stream_lines(parse_config(base("grpo", rollouts=rollouts(stragglers="carry_over", **settings)), "grpo"))

    assert said(max_staleness=1, oversample=2) == [
        "while it learns, no group is begun; at most 6 groups are under way while it waits for its own",
        "groups under way when enough others have ended are left to the next step (stragglers)",
        "no token that it trains is more than 1 version(s) old (max_staleness)",
    ]
    assert said(max_staleness=2, oversample=2)[0] == (
        "while it learns, the next step may be sampled: at most 4 groups (10 while it waits for its own)"
    )


@pytest.mark.parametrize("settings", [{}, {"oversample": 2, "dynamic_sampling": {"enabled": True}}, {"max_staleness": 1}])
def test_carrying_over_needs_room(base: Make, settings: dict[str, Any]) -> None:
    config = base("grpo", rollouts=rollouts(stragglers="carry_over", **settings))
    with pytest.raises(InputError, match=r"rollouts\.stragglers: carry_over .* set max_staleness \(now \d\) and oversample"):
        parse_config(config, "grpo")


def test_carrying_over_takes_no_whole_step(base: Make) -> None:
    def parse(**settings: Any) -> None:
        parse_config(base("grpo", rollouts=rollouts(stragglers="carry_over", **settings)), "grpo")

    with pytest.raises(InputError, match=r"4 groups carried over would take all 4 places of the next step"):
        parse(max_staleness=1, oversample=4)
    parse(max_staleness=1, oversample=3)
    parse(max_staleness=2, oversample=4)


# Stragglers -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("budget", [{}, {"width": {"max": 6}}, {"depth": {"min_episodes": 16, "max": 8, "explore": 0.5}}])
def test_carried_over_every_prompt_is_trained_once_and_a_resumed_run_goes_on(
    base: Make, tmp_path: Path, staleness: int, budget: dict[str, Any]
) -> None:
    settings = rollouts(max_staleness=staleness, oversample=3, stragglers="carry_over", max_completion_length=24, max_sequences=8)
    loss = {"loss_type": "dr_grpo", "scale_rewards": "none"}
    config = base(
        "grpo", max_steps=8, save_steps=4, save_total_limit=None, sequence_len=64, rollouts=settings | {"budget": budget}, loss=loss
    )
    result = surogate_rl.grpo(config)
    run = tmp_path / "run"
    plain = surogate_rl.grpo(
        base("grpo", max_steps=8, rollouts=rollouts(max_completion_length=1), loss=loss, output_dir=str(tmp_path / "plain"))
    )

    def tasks(directory: Path) -> list[int]:
        return sorted(task for step in rows_by_step(directory) for task in {row["task"] for row in step})

    # those of the first eight steps, each as often, and four in each step
    assert tasks(run) == tasks(plain.output_dir)
    assert all(len({row["task"] for row in step}) == 4 for step in rows_by_step(run))
    assert all(line["rollouts/staleness_max"] <= staleness and line["rollouts/dropped_stale"] == 0 for line in result.history)
    assert all(line["rollouts/passed_over"] <= line["rollouts/carried_over"] for line in result.history)
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    shutil.rmtree(run / "final")
    resumed = surogate_rl.grpo(config | {"resume": "auto"})
    assert resumed.steps == 8
    assert tasks(run) == tasks(plain.output_dir)


# Stopping -----------------------------------------------------------------------------------------------------------------------------


def test_ahead_of_the_learner_a_stopped_run_goes_on_where_it_was(base: Make, tmp_path: Path) -> None:
    settings = rollouts(max_staleness=1, oversample=2)
    broken = base("grpo", max_steps=6, save_steps=2, save_total_limit=None, rollouts=settings)
    surogate_rl.grpo(broken)
    run = tmp_path / "run"
    state = json.loads((run / "checkpoints" / "step-00000004" / "state.json").read_text())["algorithm"]["rollouts"]
    assert (state["first"], state["step"], state["version"]) == (16, 4, 4)
    assert [entry["number"] for entry in state["unfinished"]] == list(range(16, 16 + len(state["unfinished"])))
    assert state["unfinished"]
    tasks = [[row["task"] for row in step] for step in rows_by_step(run)]
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    shutil.rmtree(run / "final")
    result = surogate_rl.grpo(broken | {"resume": "auto"})
    assert result.steps == 6
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4, 5, 6]
    assert [[row["task"] for row in step] for step in rows_by_step(run)] == tasks
    assert lines(run)[4]["rollouts/staleness_max"] == 0  # sampled anew, with the weights of the checkpoint
    assert lines(run)[5]["rollouts/staleness_max"] <= 1


@pytest.mark.parametrize("times", [1, 2])
def test_interrupted_with_requests_under_way_nothing_hangs_or_is_left(base: Make, tmp_path: Path, times: int) -> None:
    config = base("grpo", max_steps=100000, sequence_len=64, rollouts=rollouts(max_staleness=1, oversample=4, max_completion_length=50))
    script = textwrap.dedent(f"""
        import itertools, time
        import surogate_rl
        from surogate_rl.learner import Learner
        from surogate_rl.rollouts.engines.native import NativeEngine
        forward, decode, count, pause = Learner.forward, NativeEngine._step, itertools.count(1), 0.0
        def hold(*arguments, **options):
            global pause
            if {times} == 2 and next(count) == 60:  # in the middle of a step, which only the second signal ends
                pause = 0.3  # the engine is not done by then
                print("HELD", flush=True)
                time.sleep(600)
            return forward(*arguments, **options)
        def slow(engine):
            time.sleep(pause)
            decode(engine)
        Learner.forward, NativeEngine._step = hold, slow
        try:
            surogate_rl.grpo({config!r})
        except KeyboardInterrupt as stop:
            print("STOPPED", stop, flush=True)
    """)
    out, err, metrics = tmp_path / "out", tmp_path / "err", tmp_path / "run" / "metrics.jsonl"

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert process.poll() is None, err.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=stdout, stderr=stderr)
    try:
        wait_for(lambda: metrics.is_file() and metrics.read_text().count("\n") > 2)
        if times == 2:
            wait_for(lambda: "HELD" in out.read_text())
        workers = psutil.Process(process.pid).children(recursive=True)
        assert workers
        process.send_signal(signal.SIGINT)
        if times == 2:
            wait_for(lambda: "once more to stop at once" in err.read_text())
            process.send_signal(signal.SIGINT)
        process.wait(120)
    finally:
        process.kill()
        process.wait()
    assert "STOPPED" in out.read_text()
    if times == 1:
        assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    for noise in ("never retrieved", "was destroyed", "Exception ignored", "Traceback"):
        assert noise not in err.read_text()
    psutil.wait_procs(workers, timeout=30)
    assert not [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]


def test_a_reward_that_fails_under_way_costs_its_completion_only(base: Make) -> None:
    def sometimes(completion: str, answer: str) -> float:
        if "1" in completion:
            raise KeyError("gone")
        return len(completion) / 10

    config = base("grpo", max_steps=6, rollouts=rollouts(max_staleness=1, oversample=4))
    config["rewards"] = []
    result = surogate_rl.grpo(config, rewards=[sometimes])
    assert sum(line["completions/unscored"] for line in result.history) > 0
    assert result.steps == 6


def test_a_reward_that_is_wrong_under_way_ends_the_run_with_its_message(base: Make) -> None:
    def short(completions: list[str], **columns: Any) -> list[float]:
        return [1.0]

    config = base("grpo", rollouts=rollouts(max_staleness=1))
    config["rewards"] = []
    with pytest.raises(ValueError, match="short"):
        surogate_rl.grpo(config, rewards=[short])


def test_an_engine_that_fails_while_the_learner_learns_ends_the_run(base: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    real = NativeEngine._step

    def failing(self: NativeEngine) -> None:
        nonlocal steps
        steps += 1
        if steps > 30:
            raise RuntimeError("no more")
        real(self)

    monkeypatch.setattr(NativeEngine, "_step", failing)
    with pytest.raises(RuntimeError, match="the native engine failed: RuntimeError: no more"):
        surogate_rl.grpo(base("grpo", max_steps=100, rollouts=rollouts(max_staleness=1)))
