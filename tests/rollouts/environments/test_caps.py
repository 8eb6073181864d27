"""What a budget's cap ends, and what ends there by itself: the same whether the episode was drawn to go on or not.

Every case is played three times: without a cap, cut, and going on. An episode has reached its cap if and only if it would have gone on
there; then, and only then, the one that was not drawn is cut by the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from surogate_rl.rollouts.types import DepthCap, Episode, EpisodeLimits, Observation, Task

ROOM = EpisodeLimits(512, 4096, max_turns=6)


class Game:
    """Over after `last` turns, or cut off then by the environment's own limit (`truncated`). It raises in turn `fails`."""

    def __init__(
        self, last: int = 6, *, truncated: bool = False, fails: int | None = None, words: str = "go on", role: str = "user"
    ) -> None:
        self.last, self.truncated, self.fails = last, truncated, fails
        self.words, self.role = words, role

    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation()

    async def step(self, episode: Episode, action: str) -> Observation:
        if episode.turns == self.fails:
            raise OSError("lost")
        over = episode.turns >= self.last
        return Observation([{"role": self.role, "content": self.words}], done=over, truncated=over and self.truncated, reward=1.0)

    async def close(self) -> None:
        return None


@dataclass(frozen=True)
class Case:
    """Attributes:
    cap: depth and unit.
    reached: whether the cap is reached.
    cut: what ends the one that is not drawn to go on.
    tokens: that it has sampled then; turns have three, the last one eos.
    error: whether that one is lost.
    """

    game: Callable[[], Game]
    cap: tuple[int, str]
    reached: bool
    cut: str | None
    tokens: int
    limits: EpisodeLimits = ROOM
    error: bool = False
    family: str = "qwen2_5"


LONG = "on and on " * 400
CASES = {
    "turns: it would go on": Case(Game, (2, "turns"), True, "turns", 6),
    "turns: over before": Case(lambda: Game(1), (2, "turns"), False, None, 3),
    "turns: over just there": Case(lambda: Game(2), (2, "turns"), False, None, 6),
    "turns: the environment's own limit lies there": Case(lambda: Game(2, truncated=True), (2, "turns"), False, "turns", 6),
    "turns: so does the run's": Case(Game, (2, "turns"), False, "turns", 6, replace(ROOM, max_turns=2)),
    "turns: the context is full there": Case(lambda: Game(words=LONG), (1, "turns"), False, "length", 3, EpisodeLimits(512, 300)),
    "turns: the template refuses there": Case(lambda: Game(role="judge"), (1, "turns"), False, None, 3, error=True, family="mistral"),
    "turns: the environment fails there": Case(lambda: Game(fails=2), (2, "turns"), False, None, 6, error=True),
    "turns: the environment fails later": Case(lambda: Game(fails=3), (2, "turns"), True, "turns", 6),
    "tokens: in the midst of a turn": Case(Game, (4, "tokens"), True, "tokens", 4),
    "tokens: in the midst of the last turn": Case(lambda: Game(2), (4, "tokens"), True, "tokens", 4),
    "tokens: half a turn makes the environment fail": Case(lambda: Game(fails=2), (4, "tokens"), True, None, 4, error=True),
    "tokens: at the end of a turn": Case(Game, (6, "tokens"), True, "tokens", 6),
    "tokens: over just there": Case(lambda: Game(2), (6, "tokens"), False, None, 6),
    "tokens: the environment's own limit lies there": Case(lambda: Game(2, truncated=True), (6, "tokens"), False, "turns", 6),
    "tokens: the context is full there": Case(lambda: Game(words=LONG), (3, "tokens"), False, "length", 3, EpisodeLimits(512, 300)),
    "tokens: turns are no longer than that, and it goes on": Case(
        Game, (2, "tokens"), True, "tokens", 2, replace(ROOM, max_completion_length=2)
    ),
    "tokens: turns are no longer than that, and it is over": Case(
        lambda: Game(1, truncated=True), (2, "tokens"), False, "length", 2, replace(ROOM, max_completion_length=2)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cap_ends_what_would_go_on_and_nothing_else(name: str, family: Callable[[str], Any], play: Callable[..., Any]) -> None:
    case = CASES[name]
    tokenizer = family(case.family)
    (word,) = tokenizer("0", add_special_tokens=False)["input_ids"]
    turn = [word, word, tokenizer.eos_token_id]
    depth, unit = case.cap

    def run(cap: DepthCap | None) -> Episode:
        episode: Episode = play(tokenizer, case.game, [turn], limits=replace(case.limits, cap=cap))[0]
        return episode

    free, cut, gone_on = run(None), run(DepthCap(unit, depth, False)), run(DepthCap(unit, depth, True))  # type: ignore[arg-type]
    assert (cut.reached_cap, gone_on.reached_cap, free.reached_cap) == (case.reached, case.reached, False)
    assert (cut.cut, cut.sampled_tokens, cut.error is not None) == (case.cut, case.tokens, case.error)
    # one that goes on is the one without a cap, and so is one that does not come to it
    for same in (gone_on, *([] if case.reached else [cut])):
        assert (same.segments, same.cut, same.turns, same.turn_rewards) == (free.segments, free.cut, free.turns, free.turn_rewards)
        assert (same.error, same.truncated, same.messages) == (free.error, free.truncated, free.messages)
    if case.reached:  # and it has more depth than the cap
        assert free.depth(unit) > depth == cut.depth(unit)  # type: ignore[arg-type]
        assert cut.truncated
