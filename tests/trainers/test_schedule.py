from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from surogate_rl.trainers.batches import StepOrder
from surogate_rl.trainers.schedule import Schedule


def test_worked_case() -> None:
    schedule = Schedule("linear", peak=1.0, warmup=2, total=10)
    assert [schedule(step) for step in range(10)] == pytest.approx([0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125])


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "constant_with_warmup"])
def test_curves_are_those_of_transformers(kind: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.3)
    theirs = get_scheduler(kind, optimizer, num_warmup_steps=5, num_training_steps=40)
    ours = Schedule(kind, peak=0.3, warmup=0 if kind == "constant" else 5, total=40)
    for step in range(40):
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_an_epoch_is_every_row_once() -> None:
    order = StepOrder(rows=10, per_step=4, seed=1)
    assert order.steps_per_epoch == 3
    first = [row for step in (1, 2, 3) for row in order(step)]
    second = [row for step in (4, 5, 6) for row in order(step)]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert len(order(3)) == 2
    assert order.epoch(3) == 1.0


def test_wrapped_steps_are_full_and_lose_nothing() -> None:
    order = StepOrder(rows=10, per_step=4, seed=1, wrap=True)
    rows = [row for step in range(1, 6) for row in order(step)]
    assert all(len(order(step)) == 4 for step in range(1, 6))
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert order.epoch(5) == 2.0


def test_more_rows_per_step_than_there_are() -> None:
    order = StepOrder(rows=3, per_step=8, seed=0, wrap=True)
    assert sorted(order(1)[:3]) == sorted(order(1)[3:6]) == [0, 1, 2]
