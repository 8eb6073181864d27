"""Runs whose engine is lost for good: what they leave, and how they go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surogate_rl
from surogate_rl.checkpoint import CheckpointStore
from surogate_rl.errors import InputError
from surogate_rl.rollouts.engines.native import NativeEngine
from surogate_rl.rollouts.engines.vllm.errors import EngineFailed
from surogate_rl.rollouts.engines.vllm.factory import Launched
from surogate_rl.trainers import commands, sampling

from .outputs import lines, same, weights

Make = Callable[..., dict[str, Any]]
STEPS = 5


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """From now on engines are lost while they sample with weights of version `sampling_with`, or take version `taking`."""

    def losing(*, sampling_with: int | None = None, taking: int | None = None) -> None:
        class Losing(NativeEngine):
            async def generate(self, request: Any) -> Any:
                if self.version == sampling_with:
                    raise EngineFailed("the engine is lost")
                return await super().generate(request)

            async def update_weights(self, learner: Any, version: int) -> None:
                if version == taking:
                    raise EngineFailed("the engine is lost")
                await super().update_weights(learner, version)

        monkeypatch.setattr(sampling, "NativeEngine", Losing)

    return losing


def after_a_loss(config: dict[str, Any]) -> tuple[int, int, str]:
    """Steps of the newest checkpoint, the number of checkpoints, and the error."""
    with pytest.raises(EngineFailed) as caught:
        surogate_rl.grpo(config)
    steps = CheckpointStore(Path(config["output_dir"]) / "checkpoints", None).steps()
    return (max(steps) if steps else 0), len(steps), str(caught.value)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("when", "left"), [({"sampling_with": 2}, 2), ({"taking": 3}, 3)], ids=["sampling", "sync"])
def test_what_was_learned_is_saved_and_the_run_can_go_on_from_it(
    base: Make, tmp_path: Path, lose: Callable[..., None], when: dict[str, int], left: int, lora: bool
) -> None:
    whole = surogate_rl.grpo(base("grpo", output_dir=str(tmp_path / "whole"), max_steps=STEPS, lora=lora))
    config = base("grpo", output_dir=str(tmp_path / "lost"), max_steps=STEPS, lora=lora)
    lose(**when)
    step, count, message = after_a_loss(config)
    assert (step, count) == (left, 1)
    assert "the engine is lost" in message
    assert f"the run stops after step {left}; checkpoint in" in message
    assert "go on with --set resume=auto" in message
    lose()
    resumed = surogate_rl.grpo(config | {"resume": "auto"})
    assert same(weights(resumed.final_model), weights(whole.final_model))
    assert resumed.metrics["num_tokens"] == whole.metrics["num_tokens"]


def test_a_step_that_changed_no_weight_counts_as_learned(base: Make, tmp_path: Path, lose: Callable[..., None]) -> None:
    """Its prompts are used up: a checkpoint that called itself the step before would train none in their place."""

    def equal_in_step_two(completion: str, trainer_state: Any) -> float:
        return 1.0 if trainer_state.global_step == 2 else float(len(completion))

    def config(name: str) -> dict[str, Any]:
        made = base("grpo", output_dir=str(tmp_path / name), max_steps=4, rewards=[])
        made["rollouts"]["dynamic_sampling"] = {"enabled": True, "max_rounds": 1}
        return made

    rewards = [equal_in_step_two]
    whole = surogate_rl.grpo(config("whole"), rewards=rewards)
    assert [line["grad_norm"] == 0 for line in lines(tmp_path / "whole")] == [False, True, False, False]
    lose(taking=2)
    with pytest.raises(EngineFailed, match="the run stops after step 2"):
        surogate_rl.grpo(config("lost"), rewards=rewards)
    (step,) = CheckpointStore(tmp_path / "lost" / "checkpoints", None).steps()
    assert step == 2
    lose()
    resumed = surogate_rl.grpo(config("lost") | {"resume": "auto"}, rewards=rewards)
    assert same(weights(resumed.final_model), weights(whole.final_model))
    assert [line["epoch"] for line in resumed.history] == [line["epoch"] for line in whole.history[2:]]


@pytest.mark.parametrize(("save_steps", "at", "total"), [(0, 2, STEPS), (2, 2, STEPS), (0, STEPS, STEPS)], ids=["unsaved", "saved", "last"])
def test_an_engine_that_is_lost_during_an_evaluation(
    base: Make, data: Path, tmp_path: Path, lose: Callable[..., None], save_steps: int, at: int, total: int
) -> None:
    held_out = {"datasets": [{"path": str(data / "heldout.jsonl"), "type": "prompt"}], "steps": 2, "at_start": False}

    def config(name: str) -> dict[str, Any]:
        return base("grpo", output_dir=str(tmp_path / name), max_steps=total, save_steps=save_steps, eval=held_out)

    whole = surogate_rl.grpo(config("whole"))
    lose(sampling_with=at)
    step, count, message = after_a_loss(config("lost"))
    assert (step, count) == (at, 1)
    assert f"the run stops after step {at}; checkpoint in" in message
    logged = lines(tmp_path / "lost")
    assert [line["step"] for line in logged if "loss" in line][-1] == at
    assert not [line for line in logged if line["step"] == at and "eval_reward" in line], "it was lost during this evaluation"
    lose()
    resumed = surogate_rl.grpo(config("lost") | {"resume": "auto"})
    assert same(weights(resumed.final_model), weights(whole.final_model))


def test_before_the_first_step_there_is_nothing_to_save(base: Make, data: Path, lose: Callable[..., None]) -> None:
    held_out = {"datasets": [{"path": str(data / "heldout.jsonl"), "type": "prompt"}]}
    lose(sampling_with=0)
    step, _, message = after_a_loss(base("grpo", eval=held_out))
    assert step == 0
    assert "the engine is lost\nthe run stops; nothing had been learned yet" in message


def test_ahead_of_the_learner_too(base: Make, tmp_path: Path, lose: Callable[..., None]) -> None:
    config = base("grpo", max_steps=STEPS)
    config["rollouts"]["max_staleness"] = 1
    lose(taking=3)
    step, count, message = after_a_loss(config)
    assert (step, count) == (3, 1)
    assert "the run stops after step 3" in message
    lose()
    resumed = surogate_rl.grpo(config | {"resume": "auto"})
    assert resumed.steps == STEPS
    assert [line["step"] for line in resumed.history] == [4, 5]


def test_no_engine_is_left_by_a_run_that_cannot_start(base: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets ready before everything else; then the rewards turn out not to be there."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    made: list[Launched] = []

    def noted(config: Any) -> Launched:
        made.append(Launched(config))
        return made[-1]

    def refuse(*arguments: Any, **options: Any) -> None:
        assert [process.pid for process in made[0].processes], "it is under way"
        raise InputError("rewards: there are none")

    monkeypatch.setattr(commands, "Launched", noted)
    monkeypatch.setattr(commands, "load_rewards", refuse)
    config = base("grpo", device="cpu")
    config["rollouts"] |= {"engine": "vllm", "vllm": {"python": str(python)}}
    del config["rollouts"]["max_sequences"]
    with pytest.raises(InputError, match="there are none"):
        surogate_rl.grpo(config)
    (process,) = made[0].processes
    assert process._process.poll() is not None
