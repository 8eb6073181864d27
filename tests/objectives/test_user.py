"""Objectives of the user's own: loading, calling, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from surogate_rl.config.schema import PolicyLossConfig, PreferenceLossConfig, SftLossConfig
from surogate_rl.objectives import concatenate, load_user_objective, make_objective, mean_metrics, seeds, split, step_seeds, totals_of

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = f"{ROOT}/examples/custom_objective/spread_penalty.py:spread_penalty"


def write(tmp_path: Path, body: str, attributes: str = "") -> str:
    (tmp_path / "own.py").write_text(
        f"import torch\nfrom surogate_rl.objectives import Loss\n\ndef loss(stats, batch, totals, scale=1.0):\n    {body}\n\n{attributes}\n"
    )
    return f"{tmp_path}/own.py:loss"


def call(tools: SimpleNamespace, spec: str, args: dict[str, Any] | None = None) -> Any:
    objective = load_user_objective(spec, args)
    batch, logp, entropy = tools.pack_step(tools.make_step())
    return seeds(objective, logp, entropy if objective.needs_entropy else None, batch, totals_of(objective, [batch]))


def test_arguments_and_a_bare_tensor(tools: SimpleNamespace, tmp_path: Path) -> None:
    spec = write(tmp_path, "return -scale * stats.logp[torch.as_tensor(batch.mask)].sum() / totals.tokens")
    once, twice = call(tools, spec), call(tools, spec, {"scale": 2.0})
    nll = make_objective(SftLossConfig(), command="sft")
    batch, logp, _ = tools.pack_step(tools.make_step())
    expected = seeds(nll, logp, None, batch, totals_of(nll, [batch]))
    assert once.loss == pytest.approx(expected.loss, rel=1e-6)
    np.testing.assert_allclose(twice.dlogp, 2 * expected.dlogp, rtol=1e-6)
    assert mean_metrics([once.metrics])["loss"] == pytest.approx(once.loss)


def test_attributes(tools: SimpleNamespace, tmp_path: Path) -> None:
    spec = write(tmp_path, "return stats.logp.sum()")
    objective = load_user_objective(spec)
    assert (objective.unit, objective.needs_entropy, objective.needs_reference) == ("step", False, False)
    spec = write(
        tmp_path, "return (stats.entropy * 2).sum()", 'loss.unit = "token"; loss.needs_entropy = True; loss.needs_reference = True'
    )
    objective = load_user_objective(spec)
    assert (objective.unit, objective.needs_entropy, objective.needs_reference) == ("token", True, True)
    result = call(tools, spec)
    batch, _, _ = tools.pack_step(tools.make_step())
    assert result.dentropy is not None
    np.testing.assert_array_equal(result.dentropy, np.where(batch.mask, 2.0, 0.0))
    assert (result.dlogp == 0).all()
    with pytest.raises(ValueError, match="loss: attribute unit is 'batch', expected one of token, sequence, pair, step"):
        load_user_objective(write(tmp_path, "return 0", 'loss.unit = "batch"'))
    with pytest.raises(ValueError, match="loss: attribute needs_entropy is 1, expected True or False"):
        load_user_objective(write(tmp_path, "return 0", "loss.needs_entropy = 1"))


def test_a_loss_that_sums_over_all_positions_trains_only_the_mask(tools: SimpleNamespace, tmp_path: Path) -> None:
    batch, _, _ = tools.pack_step(tools.make_step())
    np.testing.assert_array_equal(call(tools, write(tmp_path, "return stats.logp.sum()")).dlogp, batch.mask.astype(np.float32))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1.0", "own.py:loss: returned float, expected a scalar torch.Tensor or a Loss"),
        ("return None", "own.py:loss: returned NoneType, expected"),
        ("return stats.logp", r"own.py:loss: returned a tensor of shape \(\d+,\), expected a scalar"),
        ("return torch.tensor(1)", "own.py:loss: returned a tensor of torch.int64, expected a floating-point one"),
        ("return stats.logp.sum().detach()", "own.py:loss: the returned loss does not depend on stats.logp"),
        ("return Loss(stats.logp)", "own.py:loss: returned a tensor of shape"),
        ("return Loss(stats.logp.sum(), [1])", "own.py:loss: Loss.metrics is list, expected a mapping"),
        ("return Loss(stats.logp.sum(), {'x': 3})", r"own.py:loss: metric 'x' is 3, expected a pair of numbers \(sum, weight\)"),
    ],
)
def test_wrong_returns(tools: SimpleNamespace, tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(tools, write(tmp_path, body))


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*nowhere.py"):
        load_user_objective(f"{tmp_path}/nowhere.py:loss")
    spec = write(tmp_path, "return 0")
    with pytest.raises(ValueError, match=r"own.py has no function lost \(functions: loss\)"):
        load_user_objective(spec.replace(":loss", ":lost"))
    with pytest.raises(ValueError, match=r"is no function name, expected path/file.py:fn"):
        load_user_objective(spec + "()")
    with pytest.raises(
        ValueError, match=r"cannot be called as fn\(stats, batch, totals, \*\*args\) with args scael: .*unexpected.*'scael'"
    ):
        load_user_objective(spec, {"scael": 1})
    (tmp_path / "broken.py").write_text("import no_such_module_here\n")
    with pytest.raises(ValueError, match=r"importing .*broken.py failed: ModuleNotFoundError: No module named 'no_such_module_here'"):
        load_user_objective(f"{tmp_path}/broken.py:loss")


def test_a_reference_that_nobody_keeps(tmp_path: Path) -> None:
    plain = write(tmp_path, "return stats.logp.sum()")
    with pytest.raises(ValueError, match=r"loss.sync_ref_model: there is no reference to move, since .*own.py:loss does not ask for one"):
        make_objective(PolicyLossConfig(loss_type=plain, sync_ref_model=True), command="grpo")
    referenced = write(tmp_path, "return stats.logp.sum()", "loss.needs_reference = True")
    assert make_objective(PolicyLossConfig(loss_type=referenced, sync_ref_model=True), command="grpo").needs_reference
    assert make_objective(PreferenceLossConfig(loss_type=referenced), command="dpo").needs_reference
    with pytest.raises(ValueError, match=r"own.py:loss: attribute needs_reference is True, but sft keeps no reference policy"):
        make_objective(SftLossConfig(loss_type=referenced), command="sft")
    with pytest.raises(ValueError, match=r"loss_type: expected path/file.py:fn, got 'own.py'"):
        make_objective(SftLossConfig(loss_type="own.py"), command="sft")


def test_an_exception_of_the_users_passes_through(tools: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="nothing"):
        call(tools, write(tmp_path, "return batch.per_token['nothing']"))


def test_the_example_does_not_separate_and_is_given_the_whole_step(tools: SimpleNamespace) -> None:
    objective = make_objective(PolicyLossConfig(loss_type=EXAMPLE, args={"penalty": 0.5}), command="grpo")
    assert objective.unit == "step"
    step = tools.make_step(1)
    whole, logp, _ = tools.pack_step(step)
    parts = [tools.pack_step(step, rows) for rows in ([0, 1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11])]
    batches = [batch for batch, _, _ in parts]
    totals = totals_of(objective, batches)
    assert totals == totals_of(objective, [whole])
    expected = seeds(objective, logp, None, whole, totals)
    result = step_seeds(objective, [part[1] for part in parts], [part[2] for part in parts], batches, totals)
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    for got, want in zip(result.dlogp, split(expected.dlogp, batches), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9)
    assert mean_metrics([result.metrics])["loss"] == pytest.approx(expected.loss, rel=1e-6)
    apart = sum(seeds(objective, part[1], None, part[0], totals).loss for part in parts)
    assert apart != pytest.approx(expected.loss, rel=1e-2)
    assert (concatenate(batches).tokens == whole.tokens).all()

    # By hand in float64.
    drift = np.array([float((c.astype(np.float64) - p).mean()) for c, p in zip(step.current, step.proximal, strict=True)])
    advantage = whole.per_sequence["advantage"].astype(np.float64)
    assert expected.loss == pytest.approx(-(advantage * drift).mean() + 0.5 * drift.var(), rel=1e-4)


def test_the_example_on_nothing_is_zero(tools: SimpleNamespace) -> None:
    objective = make_objective(PolicyLossConfig(loss_type=EXAMPLE), command="grpo")
    batch, logp, _ = tools.pack_step(tools.make_step())
    batch.mask[:] = False
    result = seeds(objective, logp, None, batch, totals_of(objective, [batch]))
    assert result.loss == 0
    assert (result.dlogp == 0).all()


def test_the_gap_to_the_sampler_is_measured_for_every_objective(tools: SimpleNamespace, tmp_path: Path) -> None:
    own = call(tools, write(tmp_path, "return stats.logp.sum()"))
    grpo = make_objective(PolicyLossConfig(), command="grpo")
    batch, logp, entropy = tools.pack_step(tools.make_step())
    expected = seeds(grpo, logp, entropy, batch, totals_of(grpo, [batch])).metrics
    names = [name for name in expected if name.startswith("sampling/")]
    assert len(names) == 7
    assert {name: own.metrics[name] for name in names} == {name: expected[name] for name in names}
    assert own.metrics["sampling/kl"][0] > 0
