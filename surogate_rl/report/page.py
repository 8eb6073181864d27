"""The report as one HTML text. Everything that comes from a model or a file is escaped."""

from __future__ import annotations

import math
from datetime import datetime
from html import escape

from surogate_rl.console import SHOWN, evaluation_rank, format_number, format_seconds
from surogate_rl.report.charts import is_noisy, line_chart
from surogate_rl.report.data import Rollout, RolloutStep, Run, Series
from surogate_rl.report.style import CSS, SCRIPT

# Lower bounds of the probability for each colour, from plain to hot.
SHADES = (0.9, 0.6, 0.3, 0.1, 0.01)

_NOISY = "Noisy curves: thin as logged, strong as a running mean over a twentieth of them."


def shade(logp: float) -> int:
    """0 for a token that was nearly certain, 5 for one that was sampled against the odds."""
    probability = math.exp(min(logp, 0.0)) if not math.isnan(logp) else 0.0
    return next((level for level, bound in enumerate(SHADES) if probability >= bound), len(SHADES))


def render(run: Run) -> str:
    """A self-contained page: light and dark, no request to anywhere."""
    evaluation, training, further = _split(run.series)
    body = [_head(run), _tiles(training, evaluation)]
    if evaluation:
        body.append(_charts("Evaluation", evaluation))
    body.append(_charts("Training", training, note=_NOISY))
    if run.rollouts:
        body.append(_rollouts(run))
    if further:
        body.append(_further(further))
    if run.notes:
        body.append("<h2>Notes</h2>" + "".join(f"<p>{escape(note)}</p>" for note in run.notes))
    if run.config:
        body.append(f"<h2>Configuration</h2><details><summary>config.yaml</summary><pre>{escape(run.config)}</pre></details>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)}</title><style>{CSS}</style></head>\n<body>\n"
        + "\n".join(body)
        + f"\n<script>{SCRIPT}</script>\n</body></html>\n"
    )


def _split(series: list[Series]) -> tuple[list[Series], list[Series], list[Series]]:
    """Evaluation and training, what matters most first, and the rest."""
    evaluation: list[tuple[int, Series]] = []
    training: list[tuple[int, Series]] = []
    further: list[Series] = []
    for item in sorted(series, key=lambda item: item.name):
        is_evaluation = item.name.startswith(("eval_", "eval/"))
        rank = evaluation_rank(item.name) if is_evaluation else SHOWN.index(item.name) if item.name in SHOWN else None
        if rank is None and _is_reward(item.name):
            rank = len(SHOWN)
        if rank is None:
            further.append(item)
        else:
            (evaluation if is_evaluation else training).append((rank, item))
    ranked = [[item for _, item in sorted(group, key=lambda pair: pair[0])] for group in (evaluation, training)]
    if not ranked[1]:
        # A run of other names: everything is worth a look.
        return ranked[0], further, []
    return ranked[0], ranked[1], further


def _is_reward(name: str) -> bool:
    """The mean of one reward function."""
    return name.removeprefix("eval_").startswith("rewards/") and name.endswith("/mean")


def _further(series: list[Series]) -> str:
    constant = [item for item in series if item.constant]
    changing = [item for item in series if not item.constant]
    charts = f'<div class="charts">{"".join(line_chart(item.name, item.points) for item in changing)}</div>' if changing else ""
    values = ", ".join(f"{escape(item.name)} {'null' if item.last is None else format_number(item.last)}" for item in constant)
    line = f'<p class="soft">Constant: {values}</p>' if constant else ""
    return f"<h2>Further metrics</h2><details><summary>{len(series)} more</summary>{line}{charts}</details>"


def _head(run: Run) -> str:
    facts = [f"{run.last_step} steps"]
    if run.first_time and run.last_time:
        begin, end = datetime.fromisoformat(run.first_time), datetime.fromisoformat(run.last_time)
        facts += [f"{begin:%Y-%m-%d %H:%M} UTC", f"{format_seconds((end - begin).total_seconds())} long"]
    return f'<h1>{escape(run.name)}</h1><p class="soft">{escape(", ".join(facts))}</p>'


def _tiles(training: list[Series], evaluation: list[Series]) -> str:
    wanted = [item for item in training if item.name in SHOWN[:8]] + evaluation[:4]
    tiles = [(item.name, item.last) for item in wanted]
    cells = "".join(
        f'<div class="tile"><b>{format_number(last)}</b><span>{escape(name)}</span></div>' for name, last in tiles if last is not None
    )
    return f'<div class="tiles">{cells}</div>'


def _charts(title: str, series: list[Series], note: str = "") -> str:
    if not series:
        return f"<h2>{title}</h2><p>No metrics were logged.</p>"
    about = f'<p class="soft">{note}</p>' if note and any(is_noisy(item.points) for item in series) else ""
    return f'<h2>{title}</h2>{about}<div class="charts">{"".join(line_chart(item.name, item.points) for item in series)}</div>'


def _rollouts(run: Run) -> str:
    bounds = [f"p ≥ {SHADES[0]:g}", *(f"≥ {bound:g}" for bound in SHADES[1:]), f"&lt; {SHADES[-1]:g}"]
    legend = " ".join(f'<span class="t{level}">{text}</span>' for level, text in enumerate(bounds))
    some = f"{len(run.rollouts)} of {run.steps_with_rollouts} steps" if len(run.rollouts) < run.steps_with_rollouts else "all steps"
    head = f'<h2>Rollouts</h2><p class="soft legend">{some}. Tokens by the probability they were sampled with: {legend}</p>'
    last = len(run.rollouts) - 1
    return head + "".join(_step(step, opened=index == last) for index, step in enumerate(run.rollouts))


def _step(step: RolloutStep, opened: bool) -> str:
    count = f"{len(step.shown)} of {step.total} completions" if len(step.shown) < step.total else f"{step.total} completions"
    scored = [rollout.reward for rollout in step.shown if rollout.reward is not None]
    mean = f", mean reward of these {format_number(sum(scored) / len(scored))}" if scored else ""
    cards = []
    previous = None
    for rollout in step.shown:
        cards.append(_rollout(rollout, with_prompt=rollout.task != previous))
        previous = rollout.task
    return f"<details class='step'{' open' if opened else ''}><summary>Step {step.step}: {count}{mean}</summary>{''.join(cards)}</details>"


def _rollout(rollout: Rollout, with_prompt: bool) -> str:
    facts = [("task", str(rollout.task), ""), ("sample", str(rollout.sample), "")]
    facts.append(("reward", "unscored" if rollout.reward is None else format_number(rollout.reward), ""))
    if rollout.advantage is not None:
        tone = "good" if rollout.advantage > 0 else "bad" if rollout.advantage < 0 else ""
        facts.append(("advantage", format_number(rollout.advantage), tone))
    if len(rollout.rewards) > 1:
        facts += [(name, "none" if value is None else format_number(value), "") for name, value in rollout.rewards.items()]
    if rollout.turns > 1:
        facts.append(("turns", str(rollout.turns), ""))
    facts += [("tokens", str(len(rollout.tokens)), ""), ("ended by", rollout.finish_reason, "")]
    if rollout.cut:
        facts.append(("cut by", rollout.cut, ""))
    if rollout.error:
        facts.append(("error", rollout.error, "bad"))
    line = "".join(f'<span>{escape(name)} <b class="{tone}">{escape(value)}</b></span>' for name, value, tone in facts)
    prompt = f'<div class="text prompt">{escape(rollout.prompt)}</div>' if with_prompt and rollout.prompt else ""
    return f'<div class="rollout"><div class="facts">{line}</div>{prompt}{_said(rollout)}</div>'


def _said(rollout: Rollout) -> str:
    """The policy's tokens; in an episode of several turns with what the environment said to each turn."""
    text = "".join(map(_token, rollout.tokens)) if rollout.tokens else escape(rollout.completion)
    speakers = [number for number, message in enumerate(rollout.messages) if message.get("role") == "assistant"]
    several = rollout.turns > 1 and len(speakers) >= rollout.turns and len(rollout.token_turns) == len(rollout.tokens)
    if not several:
        return f'<div class="text">{text}</div>'
    parts = []
    # the task's own prompt may hold turns of an assistant too: the policy's are the last ones
    for turn, start in enumerate(speakers[-rollout.turns :]):
        own = [token for token, number in zip(rollout.tokens, rollout.token_turns, strict=True) if number == turn]
        parts.append(f'<div class="text">{"".join(map(_token, own))}</div>')
        for message in rollout.messages[start + 1 :]:
            if message.get("role") == "assistant":
                break
            role, content = str(message.get("name") or message.get("role")), str(message.get("content") or "")
            parts.append(f'<div class="text answer"><b>{escape(role)}</b> {escape(content)}</div>')
    return "".join(parts)


def _token(token: tuple[int, str, float]) -> str:
    number, text, logp = token
    shown = escape(text).replace("\n", '<span class="nl">↵</span>\n') if text else "∅"
    hint = f"id {number}, p {math.exp(min(logp, 0.0)):.3g}, logp {logp:.3f}"
    level = shade(logp)
    return f'<span class="t{level}" title="{hint}">{shown}</span>' if level else f'<span title="{hint}">{shown}</span>'
