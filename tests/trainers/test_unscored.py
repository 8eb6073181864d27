"""Steps that nothing is learned from are told, and end the run where they must."""

from __future__ import annotations

import pytest

from surogate_rl.rollouts.types import Episode, Task
from surogate_rl.trainers.unscored import EqualRewards, NothingScored, UnscoredSteps


def episode(reward: float | None, error: str | None = None) -> Episode:
    return Episode(Task(0, None, "Q", {}), 0, 0, reward=reward, error=error)


def test_only_steps_in_a_row_count() -> None:
    steps = UnscoredSteps(2)
    failed = [episode(None, "reward 'f': exception: KeyError: 'x'"), episode(None)]
    assert steps(1, failed) == "step 1: no completion could be scored, nothing was learned: reward 'f': exception: KeyError: 'x'"
    assert steps(2, [episode(None), episode(0.0)]) is None
    assert (
        steps(3, [episode(None)])
        == "step 3: no completion could be scored, nothing was learned: every reward returned None (does not apply)"
    )
    with pytest.raises(NothingScored, match=r"^no completion could be scored in 2 steps in a row, so nothing is learned: reward 'f'"):
        steps(4, failed)


def test_equal_rewards_are_told_once() -> None:
    equal = EqualRewards(patience=2)
    shares = [1.0, 0.75, 1.0, None, 1.0, 1.0, 1.0, 1.0]
    told = [equal(step, share) for step, share in enumerate(shares, start=1)]
    assert [bool(text) for text in told] == [False, False, False, False, False, True, False, False]
    assert told[5] is not None
    assert told[5].startswith("step 6: for 2 steps the completions of every prompt had equal rewards, so nothing was learned from them; ")
