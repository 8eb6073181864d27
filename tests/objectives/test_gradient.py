"""Scaling, splitting, extremes and non-finite numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surogate_rl.batch import NO_TARGET, PackedBatch, Totals
from surogate_rl.config.schema import PolicyLossConfig, SftLossConfig
from surogate_rl.objectives import (
    POLICY_LOSSES,
    LinearObjective,
    Mismatch,
    concatenate,
    make_objective,
    mean_metrics,
    merge_metrics,
    seeds,
    split,
    step_seeds,
    totals_of,
)
from surogate_rl.objectives.segments import Trained, exp_ratio, k3

NLL = make_objective(SftLossConfig(), command="sft")


def tiny(losses: list[list[float]]) -> tuple[PackedBatch, np.ndarray]:
    """Segments whose trained tokens have these losses."""
    tokens = [np.arange(1, len(row) + 2, dtype=np.int32) for row in losses]
    mask = [np.append(np.ones(len(row), bool), False) for row in losses]
    batch = PackedBatch(
        tokens=np.concatenate(tokens),
        positions=np.concatenate([np.arange(t.size, dtype=np.int32) for t in tokens]),
        cu_seqlens=np.cumsum([0] + [t.size for t in tokens]).astype(np.int32),
        targets=np.concatenate([np.append(t[1:], NO_TARGET).astype(np.int32) for t in tokens]),
        mask=np.concatenate(mask),
    )
    batch.validate()
    return batch, np.concatenate([np.append(-np.array(row), 0.0).astype(np.float32) for row in losses])


def test_normalisation_right_values() -> None:
    """Token losses [1, 1, 1, 1] and [5]: 1.8 in any split, where a mean of means would say 3."""
    whole, logp = tiny([[1, 1, 1, 1], [5]])
    totals = totals_of(NLL, [whole])
    assert totals == Totals(tokens=5, sequences=2)
    together = seeds(NLL, logp, None, whole, totals)
    assert together.loss == pytest.approx(1.8, abs=1e-6)
    parts = [tiny([[1, 1, 1, 1]]), tiny([[5]])]
    ranks = [totals_of(NLL, [batch]) for batch, _ in parts]
    assert ranks[0] + ranks[1] == totals
    apart = step_seeds(NLL, [p[1] for p in parts], [None, None], [p[0] for p in parts], totals)
    assert apart.loss == pytest.approx(1.8, abs=1e-6)
    np.testing.assert_allclose(np.concatenate(apart.dlogp), together.dlogp, atol=1e-6)
    np.testing.assert_allclose(together.dlogp[whole.mask], -0.2, atol=1e-6)
    assert mean_metrics([apart.metrics])["loss"] == pytest.approx(1.8, abs=1e-6)


def test_three_and_one_micro_batches_on_two_ranks() -> None:
    losses = [[0.5, 2.0], [1.0], [4.0, 0.25, 1.5], [3.0]]
    whole, logp = tiny(losses)
    totals = totals_of(NLL, [whole])
    rank0 = [tiny([row]) for row in losses[:3]]
    rank1 = [tiny(losses[3:])]
    shares = [step_seeds(NLL, [p[1] for p in rank], [None] * len(rank), [p[0] for p in rank], totals) for rank in (rank0, rank1)]
    assert sum(share.loss for share in shares) == pytest.approx(seeds(NLL, logp, None, whole, totals).loss, abs=1e-6)
    flat = [x for row in losses for x in row]
    assert sum(share.loss for share in shares) == pytest.approx(sum(flat) / len(flat), abs=1e-6)


CONFIGS: list[dict[str, Any]] = [{"loss_type": name} for name in POLICY_LOSSES] + [
    {"loss_type": "grpo", "beta": 0.2, "entropy_coef": 0.1, "delta": 1.4, "mask_truncated_completions": True},
    {"loss_type": "dapo", "beta": 0.2, "entropy_coef": 0.1, "mask_truncated_completions": True, "mismatch": "geometric_mask"},
    {"loss_type": "gspo", "mismatch": "sequence_truncate", "mismatch_floor": 0.5},
    {"loss_type": "rloo", "mismatch": "geometric_truncate", "beta": 0.1},
]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("options", CONFIGS, ids=[" ".join(f"{k}={v}" for k, v in c.items()) for c in CONFIGS])
def test_any_split_of_a_step_gives_the_same(tools: SimpleNamespace, options: dict[str, Any], data: st.DataObject) -> None:
    objective = make_objective(PolicyLossConfig(**options), command="grpo", max_completion_length=16)
    step = tools.make_step(data.draw(st.integers(0, 5)))
    weights = [0.5 + 0.1 * i for i in range(len(step.rewards))] if data.draw(st.booleans()) else None
    settings_of = {
        "loss_type": options["loss_type"],
        "beta": options.get("beta", 0.0),
        "proximal": data.draw(st.booleans()),
        "weights": weights,
    }
    order = data.draw(st.permutations(range(len(step.rewards))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(order) - 1), max_size=5)))
    whole, logp, entropy = tools.pack_step(step, **settings_of)
    totals = totals_of(objective, [whole])
    expected = seeds(objective, logp, entropy, whole, totals)

    rows = [list(part) for part in np.split(np.array(order), cuts)]
    parts = [tools.pack_step(step, part, **settings_of) for part in rows]
    batches = [part[0] for part in parts]
    assert totals_of(objective, batches) == totals
    result = step_seeds(objective, [p[1] for p in parts], [p[2] for p in parts], batches, totals)
    assert result.finite
    assert result.loss == pytest.approx(expected.loss, rel=1e-6, abs=1e-6)
    want = tools.per_completion(whole, expected.dlogp)
    for batch, gradient in zip(batches, result.dlogp, strict=True):
        for row, values in tools.per_completion(batch, gradient).items():
            np.testing.assert_allclose(values, want[row], rtol=1e-6, atol=1e-7)
    shown, one = mean_metrics([result.metrics]), mean_metrics([expected.metrics])
    assert set(shown) == set(one)
    for name, value in one.items():
        assert shown[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert one["loss"] == pytest.approx(expected.loss, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("options", CONFIGS, ids=[" ".join(f"{k}={v}" for k, v in c.items()) for c in CONFIGS])
@pytest.mark.parametrize("how", ["mask", "truncated"])
def test_nothing_left_is_a_finite_zero(tools: SimpleNamespace, options: dict[str, Any], how: str) -> None:
    options = options | ({"mask_truncated_completions": True} if how == "truncated" else {})
    objective = make_objective(PolicyLossConfig(**options), command="grpo", max_completion_length=16)
    batch, logp, entropy = tools.pack_step(tools.make_step(), loss_type=options["loss_type"])
    if how == "mask":
        batch.mask[:] = False
    else:
        batch.per_sequence["truncated"][:] = 1
    totals = totals_of(objective, [batch])
    assert totals.tokens == 0
    logp[:] = np.nan  # what is not trained is never read
    result = seeds(objective, logp, entropy, batch, totals)
    assert result.loss == 0
    assert result.finite
    assert (result.dlogp == 0).all()
    assert all(math.isfinite(value) for value in mean_metrics([result.metrics]).values())


@pytest.mark.parametrize("options", CONFIGS, ids=[" ".join(f"{k}={v}" for k, v in c.items()) for c in CONFIGS])
@pytest.mark.parametrize("gap", [-500.0, 500.0])
def test_far_off_policy_stays_finite(tools: SimpleNamespace, options: dict[str, Any], gap: float) -> None:
    objective = make_objective(PolicyLossConfig(**options), command="grpo", max_completion_length=16)
    batch, logp, entropy = tools.pack_step(tools.make_step(), loss_type=options["loss_type"], beta=options.get("beta", 0.0))
    for name in ("proximal_logp", "reference_logp", "behaviour_logp"):
        batch.per_token[name][batch.mask] -= gap * np.float32({"proximal_logp": 1, "reference_logp": -1, "behaviour_logp": 2}[name])
    result = seeds(objective, logp, entropy, batch, totals_of(objective, [batch]))
    assert result.finite
    assert all(math.isfinite(value) for value in mean_metrics([result.metrics]).values())


def test_k3_by_hand_and_at_its_limits() -> None:
    d = torch.tensor([0.0, 1e-9, 1.0, -1.0, 1000.0, -1000.0], dtype=torch.float64, requires_grad=True)
    value = k3(d)
    expected = [0.0, 5e-19, math.e - 2, math.exp(-1), math.exp(20) - 21, 999.0]
    np.testing.assert_allclose(value.detach().numpy(), expected, rtol=1e-6)
    value.sum().backward()
    assert d.grad is not None
    np.testing.assert_allclose(d.grad.numpy(), [0, 1e-9, math.e - 1, math.exp(-1) - 1, 0, -1], rtol=1e-6)
    assert float(exp_ratio(torch.tensor(1e6))) == pytest.approx(math.exp(20), rel=1e-6)


def test_geometric_and_sequence_mismatch_by_hand() -> None:
    batch, _ = tiny([[1, 1], [1, 1, 1, 1], [1]])
    trained = Trained.of(batch, torch.device("cpu"))
    log_ratio = torch.log(torch.tensor([2.0, 8.0, 0.5, 0.5, 1.0, 1.0, 3.0], dtype=torch.float64))
    geometric = [4.0, 4.0] + [0.5**0.5] * 4 + [3.0]  # sequence: 16, 0.25, 3

    def weights(kind: Any) -> list[float]:
        return Mismatch(kind, cap=3.5, floor=0.6).weigh(log_ratio, trained)[0].tolist()

    assert weights("geometric_truncate") == pytest.approx([3.5, 3.5, *geometric[2:]])
    assert weights("geometric_mask") == pytest.approx([0, 0, *geometric[2:]])
    assert weights("sequence_truncate") == pytest.approx([3.5, 3.5, 0.6, 0.6, 0.6, 0.6, 3.0])
    assert weights("sequence_mask") == pytest.approx([0] * 6 + [3.0])
    assert weights("token_truncate") == pytest.approx([2, 3.5, 0.6, 0.6, 1, 1, 3])
    assert weights("token_mask") == pytest.approx([2, 0, 0, 0, 1, 1, 3])
    assert weights("none") == [1.0] * 7
    metrics = mean_metrics([{k: (float(v), w) for k, (v, w) in Mismatch("none", 3.5, 0.6).weigh(log_ratio, trained)[1].items()}])
    assert metrics["sampling/clip_fraction"] == pytest.approx(3 / 7)
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(16 / 7)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(8)
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(0.5)
    ratios = np.array([2.0, 8.0, 0.5, 0.5, 1.0, 1.0, 3.0])
    assert metrics["sampling/kl"] == pytest.approx((ratios - 1 - np.log(ratios)).mean())
    _, measured = Mismatch("sequence_mask", cap=3.5, floor=0.6).weigh(log_ratio, trained)
    assert mean_metrics([{k: (float(v), w) for k, (v, w) in measured.items()}])["sampling/clip_fraction"] == pytest.approx(2 / 3)


def test_masked_weights_do_not_change_the_divisor(tools: SimpleNamespace) -> None:
    batch, logp, entropy = tools.pack_step(tools.make_step(2, noise=0.0))
    objective = make_objective(PolicyLossConfig(loss_type="dapo", mismatch="token_mask"), command="grpo")
    totals = totals_of(objective, [batch])
    before = seeds(objective, logp, entropy, batch, totals)
    gone = np.flatnonzero(batch.mask)[::2]
    batch.per_token["behaviour_logp"][gone] -= 50  # proximal / behaviour far beyond the cap
    after = seeds(objective, logp, entropy, batch, totals)
    kept = np.setdiff1d(np.flatnonzero(batch.mask), gone)
    assert (after.dlogp[gone] == 0).all()
    np.testing.assert_array_equal(after.dlogp[kept], before.dlogp[kept])
    assert totals_of(objective, [batch]) == totals


def test_reinforce_plus_plus_by_hand(tools: SimpleNamespace) -> None:
    """Clipped token ratios over the step's tokens: one low-clipped, one high-clipped, one inside."""
    batch, _ = tiny([[1.0, 1.0], [1.0]])
    batch = PackedBatch(
        **{name: getattr(batch, name) for name in ("tokens", "positions", "cu_seqlens", "targets", "mask")},
        per_token={"proximal_logp": np.log(np.array([0.5, 0.5, 1, 0.5, 1], np.float32))},
        per_sequence={"advantage": np.array([2.0, -1.0], np.float32)},
    )
    logp = np.log(np.array([0.55, 0.9, 1, 0.2, 1], np.float32))
    objective = make_objective(PolicyLossConfig(loss_type="reinforce_plus_plus"), command="grpo")
    result = seeds(objective, logp, np.zeros(5, np.float32), batch, totals_of(objective, [batch]))
    assert result.loss == pytest.approx(-(2 * 1.1 + 2 * 1.2 - 1 * 0.8) / 3, rel=1e-6)
    np.testing.assert_allclose(result.dlogp, [-2 * 1.1 / 3, 0, 0, 0, 0], rtol=1e-5)
    shown = mean_metrics([result.metrics])
    assert (shown["clip_ratio/low_mean"], shown["clip_ratio/high_mean"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))


def test_weights_multiply_a_sequence_and_no_divisor(tools: SimpleNamespace) -> None:
    step = tools.make_step(1)
    weights = [float(i % 3) for i in range(len(step.rewards))]
    for options in CONFIGS:
        objective = make_objective(PolicyLossConfig(**options), command="grpo", max_completion_length=16)
        arguments = {"loss_type": options["loss_type"], "beta": options.get("beta", 0.0)}
        batch, logp, entropy = tools.pack_step(step, **arguments)
        weighted, _, _ = tools.pack_step(step, **arguments, weights=weights)
        totals = totals_of(objective, [batch])
        plain = tools.per_completion(batch, seeds(objective, logp, entropy, batch, totals).dlogp)
        scaled = tools.per_completion(weighted, seeds(objective, logp, entropy, weighted, totals).dlogp)
        for row, gradient in scaled.items():
            np.testing.assert_allclose(gradient, plain[row] * weights[row], rtol=1e-5, atol=1e-8)


def test_non_finite_numbers_are_reported_not_raised() -> None:
    batch, logp = tiny([[1, 2], [3]])
    logp[0] = np.nan
    result = seeds(NLL, logp, None, batch, totals_of(NLL, [batch]))
    assert not result.finite
    assert math.isnan(result.loss)
    fine, fine_logp = tiny([[1.0]])
    step = step_seeds(NLL, [logp, fine_logp], [None, None], [batch, fine], Totals(4, 3))
    assert not step.finite
    assert math.isnan(step.loss)


def test_shapes_and_missing_entropy_are_errors(tools: SimpleNamespace) -> None:
    batch, logp = tiny([[1, 2], [3]])
    with pytest.raises(ValueError, match=r"logp: shape \(4,\), expected \(5,\)"):
        seeds(NLL, logp[:-1], None, batch, Totals(3, 2))
    packed, logp, _ = tools.pack_step(tools.make_step())
    objective = make_objective(PolicyLossConfig(), command="grpo")
    with pytest.raises(ValueError, match="needs the entropy"):
        seeds(objective, logp, None, packed, totals_of(objective, [packed]))


def test_missing_arrays_are_named(tools: SimpleNamespace) -> None:
    batch, logp, entropy = tools.pack_step(tools.make_step())
    for options, name in [({"beta": 0.1}, "reference_logp"), ({"mismatch": "token_mask"}, "behaviour_logp")]:
        objective = make_objective(PolicyLossConfig(**options), command="grpo")
        kept = {k: v for k, v in batch.per_token.items() if k != name}
        bare = PackedBatch(batch.tokens, batch.positions, batch.cu_seqlens, batch.targets, batch.mask, kept, batch.per_sequence)
        with pytest.raises(ValueError, match=rf"needs PackedBatch.per_token\['{name}'\], which the batch does not carry \(it has: "):
            seeds(objective, logp, entropy, bare, totals_of(objective, [bare]))
    bare = PackedBatch(batch.tokens, batch.positions, batch.cu_seqlens, batch.targets, batch.mask, batch.per_token, {})
    objective = make_objective(PolicyLossConfig(), command="grpo")
    with pytest.raises(ValueError, match=r"grpo needs PackedBatch.per_sequence\['advantage'\].*\(it has: none\)"):
        seeds(objective, logp, entropy, bare, totals_of(objective, [bare]))
    objective = make_objective(PolicyLossConfig(mask_truncated_completions=True), command="grpo")
    with pytest.raises(ValueError, match="mask_truncated_completions needs per_sequence"):
        totals_of(objective, [bare])


def test_concatenate_and_split() -> None:
    one, two = tiny([[1, 2]]), tiny([[3], [4, 5]])
    pairs = [np.array([7, 7], np.int32), np.array([7, 7], np.int32)]
    with_pairs = [
        PackedBatch(b.tokens, b.positions, b.cu_seqlens, b.targets, b.mask, pair=p) for (b, _), p in zip([two, two], pairs, strict=True)
    ]
    joined = concatenate(with_pairs)
    joined.validate()
    assert joined.pair is not None
    assert joined.pair.tolist() == [0, 0, 1, 1]
    whole = concatenate([one[0], two[0]])
    whole.validate()
    assert whole.cu_seqlens.tolist() == [0, 3, 5, 8]
    parts = split(np.arange(8, dtype=np.float32), [one[0], two[0]])
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5, 6, 7]]
    with pytest.raises(ValueError, match="only some of the batches have pair"):
        concatenate([with_pairs[0], one[0]])
    with pytest.raises(ValueError, match="there is no batch"):
        concatenate([])
    with pytest.raises(ValueError, match=r"split: shape \(7,\), expected \(8,\)"):
        split(np.zeros(7, np.float32), [one[0], two[0]])


def test_extremes_are_merged_as_extremes() -> None:
    merged = merge_metrics(
        [{"a/max": (3.0, 1.0), "a": (1.0, 2.0), "a/min": (1.0, 1.0)}, {"a/max": (2.0, 1.0), "a": (5.0, 1.0), "a/min": (0.5, 1.0)}]
    )
    assert merged == {"a/max": (3.0, 1.0), "a": (6.0, 3.0), "a/min": (0.5, 1.0)}
    assert mean_metrics([{"a": (6.0, 3.0), "b": (1.0, 0.0)}]) == {"a": 2.0}


@pytest.mark.parametrize("weighted", [False, True])
def test_seeds_known_beforehand_are_those_of_autograd(tools: SimpleNamespace, weighted: bool) -> None:
    step = tools.make_step(3)
    batch, logp, _ = tools.pack_step(step, weights=[0.1 + i for i in range(len(step.rewards))] if weighted else None)
    totals = totals_of(NLL, [batch])
    assert isinstance(NLL, LinearObjective)
    np.testing.assert_allclose(NLL.known_seeds(batch, totals), seeds(NLL, logp, None, batch, totals).dlogp, rtol=1e-6)
