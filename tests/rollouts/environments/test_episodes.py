"""Engine and environment in turn: rewards, limits, seeds, and environments that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from surogate_rl.data import encode_prompt
from surogate_rl.errors import RunError
from surogate_rl.rollouts.environments import calls as calls_module
from surogate_rl.rollouts.environments.calls import EnvironmentCalls, EnvironmentFailure
from surogate_rl.rollouts.episode import EpisodeRunner
from surogate_rl.rollouts.manager import RolloutManager
from surogate_rl.rollouts.seeds import derive_seed
from surogate_rl.rollouts.types import Completion, Episode, EpisodeLimits, GenerateRequest, Observation, SamplingParams, Task

Family = Callable[[str], Any]
Play = Callable[..., Any]


def told(text: str = "go on") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


class Counting:
    """Ends after `last` turns; gives 0.25 for each turn, and 2 for the whole."""

    def __init__(self, last: int = 3) -> None:
        self.last = last
        self.steps = self.closed = 0

    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation(told("begin"))

    async def step(self, episode: Episode, action: str) -> Observation:
        self.steps += 1
        return Observation(told(f"turn {episode.turns}"), done=episode.turns >= self.last, reward=0.25)

    def finish(self, episode: Episode) -> float:
        return 2.0

    async def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("inline", [False, True])
def test_turns_rewards_and_seeds(family: Family, play: Play, inline: bool) -> None:
    tokenizer = family("qwen2_5")
    environment = Counting()
    episode, engine = play(tokenizer, lambda: environment, ["one", "two", "three"], inline=inline, seed=11)
    assert (episode.error, episode.turns, episode.cut, episode.truncated) == (None, 3, None, False)
    assert (episode.turn_rewards, episode.final_reward, episode.environment_reward) == ([0.25] * 3, 2.0, 2.75)
    assert [request.params.seed for request in engine.requests] == [derive_seed(11, turn) for turn in range(3)]
    assert [m["content"] for m in episode.messages] == ["hi", "begin", "one", "turn 1", "two", "turn 2", "three", "turn 3"]
    assert (episode.completion, environment.closed) == ("three", 1)
    (segment,) = episode.segments
    assert segment.tokens[: len(engine.requests[2].prompt)] == list(engine.requests[2].prompt)
    assert episode.sampled_tokens == sum(len(tokenizer(t, add_special_tokens=False)["input_ids"]) + 1 for t in ("one", "two", "three"))


def test_limits_of_turns_tokens_and_length(family: Family, play: Play) -> None:
    tokenizer = family("qwen2_5")
    tokens = len(tokenizer("yes", add_special_tokens=False)["input_ids"]) + 1

    def run(limits: EpisodeLimits) -> Episode:
        episode: Episode = play(tokenizer, lambda: Counting(50), ["yes"], limits=limits)[0]
        assert episode.error is None
        assert episode.truncated == (episode.cut is not None)
        return episode

    turns = run(EpisodeLimits(64, 4096, max_turns=4))
    assert (turns.turns, turns.cut, turns.turn_rewards, turns.environment_reward) == (4, "turns", [0.25] * 4, 3.0)
    assert turns.messages[-1]["content"] == "turn 4"  # shown in the log; the policy has not seen it
    assert "turn 4" not in tokenizer.decode(turns.segments[-1].tokens)

    exact = run(EpisodeLimits(64, 4096, max_tokens=3 * tokens))
    assert (exact.turns, exact.cut, exact.sampled_tokens) == (3, "tokens", 3 * tokens)
    within = run(EpisodeLimits(64, 4096, max_tokens=3 * tokens - 1))
    assert (within.turns, within.cut, within.sampled_tokens, within.finish_reason) == (3, "tokens", 3 * tokens - 1, "length")
    both = run(EpisodeLimits(64, 4096, max_turns=3, max_tokens=3 * tokens))
    assert both.cut == "turns"

    first = len(play(tokenizer, lambda: Counting(1), ["yes"])[1].requests[0].prompt)
    short = run(EpisodeLimits(64, first + tokens + 3))
    assert (short.turns, short.cut) == (1, "length")
    assert all(len(segment.tokens) <= first + tokens + 3 for segment in short.segments)


def test_a_turn_that_is_cut_goes_on_with_the_end_that_it_lacks(family: Family, play: Play) -> None:
    tokenizer = family("qwen2_5")
    long = "the answer is five"
    episode, _ = play(tokenizer, lambda: Counting(2), [long], limits=EpisodeLimits(2, 4096))
    assert (episode.turns, episode.cut, episode.finish_reason) == (2, None, "length")
    ids = tokenizer(long, add_special_tokens=False)["input_ids"]
    assert f"{tokenizer.decode(ids[:2])}<|im_end|>\n<|im_start|>user\nturn 1<|im_end|>" in tokenizer.decode(episode.segments[0].tokens)


def test_an_environments_own_limit_is_a_cut(family: Family, play: Play) -> None:
    class Impatient(Counting):
        async def step(self, episode: Episode, action: str) -> Observation:
            return Observation(done=True, truncated=True, reward=0.0)

    episode, _ = play(family("qwen2_5"), Impatient, ["yes"])
    assert (episode.cut, episode.truncated, episode.environment_reward) == ("turns", True, 2.0)


def test_an_episode_that_nobody_rewards_has_no_reward_of_its_own(family: Family, play: Play) -> None:
    class Silent:
        def reset(self, task: Task, seed: int) -> Observation:
            return Observation()

        def step(self, episode: Episode, action: str) -> Observation:
            return Observation(told())

        def close(self) -> None:
            return None

    episode, _ = play(family("qwen2_5"), Silent, ["yes"], limits=EpisodeLimits(8, 4096, max_turns=2))
    assert (episode.environment_reward, episode.turn_rewards) == (None, [0.0, 0.0])


# ---- environments that misbehave ------------------------------------------------------------------------------------------------------


class Odd(Counting):
    """Misbehaves in one call."""

    def __init__(self, where: str, how: Callable[[], Any]) -> None:
        super().__init__()
        self.where, self.how = where, how

    async def _odd(self, name: str, usual: Any) -> Any:
        if name != self.where:
            return usual
        value = self.how()
        return await value if hasattr(value, "__await__") else value

    async def reset(self, task: Task, seed: int) -> Observation:
        return await self._odd("reset", Observation())  # type: ignore[no-any-return]

    async def step(self, episode: Episode, action: str) -> Observation:
        return await self._odd("step", Observation(told(), done=episode.turns > 1, reward=1.0))  # type: ignore[no-any-return]

    async def finish(self, episode: Episode) -> float:  # type: ignore[override]
        return await self._odd("finish", 1.0)  # type: ignore[no-any-return]

    async def close(self) -> None:
        await super().close()
        await self._odd("close", None)


def raise_key() -> Any:
    raise KeyError("lost")


def cancel() -> Any:
    raise asyncio.CancelledError


@pytest.mark.parametrize("where", ["reset", "step", "finish"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (raise_key, "KeyError: 'lost'"),
        (cancel, "CancelledError"),
        (lambda: asyncio.sleep(60), "no result after 1 s"),
        (lambda: time.sleep(60), "no result after 1 s"),  # blocks its own event loop, and nobody else's
        (lambda: "nonsense", "returned a str, expected an Observation"),
        (lambda: Observation([{"role": "user"}]), "a message is {'role': 'user'}, expected a dict with role and content as text"),
        (lambda: Observation(reward="much"), "a reward is 'much', expected a finite number or None"),  # type: ignore[arg-type]
        (lambda: Observation(reward=float("nan")), "a reward is nan, expected a finite number or None"),
    ],
)
def test_an_environment_that_misbehaves_loses_its_episode(
    family: Family, play: Play, monkeypatch: pytest.MonkeyPatch, where: str, how: Any, message: str
) -> None:
    monkeypatch.setattr("surogate_rl.rollouts.environments.calls.ANSWERS_WITHIN", 0.2)
    environment = Odd(where, how)
    if where == "finish" and message.startswith(("returned", "a message")):
        message = "a reward is "
    elif where == "finish" and "reward" in message:
        pytest.skip("finish gives a number")
    started = time.monotonic()
    episode, _ = play(family("qwen2_5"), lambda: environment, ["yes"], timeout=1.0 if message == "no result after 1 s" else 30.0)
    assert episode.error is not None
    assert episode.error.startswith(f"environment: {where}: {message}")
    assert time.monotonic() - started < 15
    assert episode.reward is None


def test_one_that_cannot_be_made_and_one_that_cannot_be_closed(family: Family, play: Play, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        raise OSError("no board")

    episode, _ = play(family("qwen2_5"), make, ["yes"])
    assert episode.error == "environment: make: OSError: no board"
    episode, _ = play(family("qwen2_5"), lambda: Odd("close", raise_key), ["yes"])
    assert (episode.error, episode.environment_reward) == (None, 3.0)  # what it was worth was known by then
    assert "close: KeyError: 'lost'" in caplog.text


def test_one_that_is_over_before_it_begins(family: Family, play: Play) -> None:
    episode, _ = play(family("qwen2_5"), lambda: Odd("reset", lambda: Observation(done=True)), ["yes"])
    assert episode.error == "environment: reset: the episode was over before it began"


def test_a_first_observation_that_leaves_no_room(family: Family, play: Play) -> None:
    episode, _ = play(family("qwen2_5"), lambda: Odd("reset", lambda: Observation(told("x" * 500))), ["yes"], limits=EpisodeLimits(8, 64))
    assert episode.error is not None
    assert "leaves no room for a completion within sequence_len 64" in episode.error


def test_a_text_with_a_token_that_the_model_does_not_have(family: Family, play: Play) -> None:
    class Odd(Counting):
        async def step(self, episode: Episode, action: str) -> Observation:
            return Observation(told("<tool_call>"), done=episode.turns >= self.last)

    tokenizer = family("qwen2_5")
    number = tokenizer.convert_tokens_to_ids("<tool_call>")
    assert number == len(tokenizer) - 2, "it is one of the last two"
    episode, engine = play(tokenizer, Odd, ["one", "two", "three"], vocab=number)
    assert episode.error == "environment: its text has the token '<tool_call>', which the tokenizer knows and the model does not"
    assert len(engine.requests) == 1, "the engine is not given it"
    assert play(tokenizer, Odd, ["one", "two", "three"], vocab=number + 1)[0].error is None


def test_an_answer_that_the_template_refuses(family: Family, play: Play) -> None:
    odd = Odd("step", lambda: Observation([{"role": "system", "content": "be good"}]))
    episode, _ = play(family("mistral"), lambda: odd, ["yes"])
    assert episode.error == "environment: the chat template refuses the messages: TemplateError: unknown role"


# ---- many at a time -------------------------------------------------------------------------------------------------------------------


class Slow:
    """An engine that takes its time over each turn: the first ones wait until there are `together` (for 10 seconds at the most)."""

    def __init__(self, tokenizer: Any, together: int = 1) -> None:
        self.ids = [*tokenizer("yes", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        self.running = self.most = 0
        self.together = together
        self.enough = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.running += 1
        self.most = max(self.most, self.running)
        if self.most >= self.together:
            self.enough.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.enough.wait(), 10)
        await asyncio.sleep(0.02)
        self.running -= 1
        return Completion(list(self.ids), [-1.0] * len(self.ids), "stop", [0] * len(self.ids))


class Scorer:
    async def score(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            episode.reward = episode.environment_reward if episode.error is None else None


def test_episodes_advance_independently_and_blocking_ones_hold_up_nobody(family: Family) -> None:
    tokenizer = family("qwen2_5")

    class Blocking:
        """Plain functions: two of eight episodes hang for good in their second turn, the rest sleep a little in every call."""

        def reset(self, task: Task, seed: int) -> Observation:
            self.number = task.index
            time.sleep(0.05)
            return Observation(told("begin"))

        def step(self, episode: Episode, action: str) -> Observation:
            time.sleep(3600 if self.number < 2 and episode.turns == 2 else 0.05)
            return Observation(told(), done=episode.turns == 4, reward=1.0)

        def close(self) -> None:
            return None

    engine = Slow(tokenizer, together=9)

    async def main() -> list[Episode]:
        runner = EpisodeRunner(
            engine=engine,  # type: ignore[arg-type]
            make_environment=Blocking,  # type: ignore[arg-type]
            tokenizer=tokenizer,
            encode=lambda task: encode_prompt(task, tokenizer),
            limits=EpisodeLimits(16, 4096),
            calls=EnvironmentCalls(2.0),
        )
        params = SamplingParams(max_tokens=1, stop_ids=(tokenizer.eos_token_id,))
        tasks = [Task(index, told("hi"), None, {}) for index in range(8)]
        groups = await RolloutManager(runner, Scorer(), seed=0).collect(tasks, 2, params, visit=0)
        return [episode for group in groups for episode in group.episodes]

    started = time.monotonic()
    episodes = asyncio.run(main())
    assert time.monotonic() - started < 20
    assert engine.most > 8
    assert [episode.error is None for episode in episodes] == [False] * 4 + [True] * 12
    assert {episode.error for episode in episodes[:4]} == {"environment: step: no result after 2 s"}
    assert [episode.reward for episode in episodes[4:]] == [4.0] * 12


def test_a_place_that_is_waited_for_does_not_count_against_the_deadline() -> None:
    async def main() -> list[Any]:
        calls = EnvironmentCalls(1.5, threads=1)
        return await asyncio.gather(*(calls("step", lambda: time.sleep(0.5) or "done") for _ in range(4)))

    assert asyncio.run(main()) == ["done"] * 4


class Hanging:
    """A plain function that hangs until it is let go, and says when it began."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = 0

    def __call__(self) -> str:
        self.begun += 1
        self.go.wait()
        return "late"


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_what_hangs_keeps_its_place_and_is_counted_until_it_returns(caplog: pytest.LogCaptureFixture) -> None:
    hanging = Hanging()

    async def main() -> None:
        calls = EnvironmentCalls(0.3, threads=2, most_hung=3, name="board.py:Board")
        for count in (1, 2):
            with pytest.raises(EnvironmentFailure, match=r"environment: step: no result after 0\.3 s"):
                await calls("step", hanging)
            assert calls.hung == count
        # both places are taken: the next call waits for one, however long that takes, and then has all of its time
        calls.timeout = 60.0
        waiting = asyncio.create_task(calls("step", lambda: "done"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        assert hanging.begun == 2
        hanging.go.set()
        assert await waiting == "done"
        await until(lambda: calls.hung == 0)
        # as many as may run at a time have places again, and threads are used again
        assert await asyncio.gather(*(calls("step", lambda n=n: n) for n in range(50))) == list(range(50))
        assert calls._threads._threads <= 2
        calls.close()

    asyncio.run(main())
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if "gave no result" in line] == [
        "environment board.py:Board: step gave no result within 0.3 s and still runs; its thread cannot be ended (1 of at most 3)",
        "environment board.py:Board: step gave no result within 0.3 s and still runs; its thread cannot be ended (2 of at most 3)",
    ]


def test_too_much_that_hangs_ends_the_run_and_names_the_environment(family: Family, play: Play, caplog: pytest.LogCaptureFixture) -> None:
    hanging = Hanging()

    class Board(Counting):
        def step(self, episode: Episode, action: str) -> Observation:  # type: ignore[override]
            hanging()
            return Observation(done=True)

    class Calls(EnvironmentCalls):
        """Only a step that hangs comes to its deadline, however slow the machine is."""

        async def __call__(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
            self.timeout = 0.3 if what == "step" and not hanging.go.is_set() else 60.0
            return await super().__call__(what, function, *args)

    tokenizer = family("qwen2_5")

    async def main() -> None:
        calls = Calls(0.3, threads=12, name="board.py:Board")
        runner = EpisodeRunner(
            engine=Slow(tokenizer),  # type: ignore[arg-type]
            make_environment=Board,  # type: ignore[arg-type]
            tokenizer=tokenizer,
            encode=lambda task: encode_prompt(task, tokenizer),
            limits=EpisodeLimits(16, 4096),
            calls=calls,
        )
        task = Task(0, told("hi"), None, {})
        params = SamplingParams(max_tokens=1, stop_ids=(tokenizer.eos_token_id,))

        async def episode() -> str | None:
            return (await runner.run(task, runner.encode(task), 0, 0, params)).error

        # half of the places may hang
        for _ in range(5):
            assert await episode() == "environment: step: no result after 0.3 s"
        for _ in range(2):  # and no call is made any more
            with pytest.raises(
                RunError, match=r"environment board\.py:Board: 6 calls hang, .* cannot be ended\. Give what the environment"
            ):
                await episode()
        assert hanging.begun == 6
        hanging.go.set()
        await until(lambda: calls.hung == 0)
        assert await episode() is None
        calls.close()

    asyncio.run(main())
    assert caplog.text.count("and still runs; its thread cannot be ended") == 3
    assert "(3 of at most 6); further ones are only counted (episodes/hung_calls)" in caplog.text


def test_blocked_event_loops_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "ANSWERS_WITHIN", 0.1)
    hanging = Hanging()

    async def blocks() -> None:
        hanging()

    async def works() -> str:
        return "works"

    async def main() -> None:
        calls = EnvironmentCalls(0.5, most_hung=2)
        with pytest.raises(EnvironmentFailure):
            await calls("step", blocks)
        assert calls.hung == 1
        with pytest.raises(RunError, match="environment: 2 calls hang"):
            await calls("step", blocks)
        hanging.go.set()
        await until(lambda: calls.hung == 0)
        calls.timeout = 60.0
        assert await calls("step", works) == "works"
        calls.close()

    asyncio.run(main())


def test_failures_that_futures_cannot_hold() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    def stops() -> None:
        raise StopIteration

    def mute() -> None:
        raise Mute

    async def main() -> list[Any]:
        calls = EnvironmentCalls(60.0)
        return await asyncio.gather(calls("step", stops), calls("step", mute), return_exceptions=True)

    assert [str(error) for error in asyncio.run(main())] == [
        "environment: step: RuntimeError: StopIteration",
        "environment: step: Mute",
    ]


def test_a_blocked_event_loop_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surogate_rl.rollouts.environments.calls.ANSWERS_WITHIN", 0.5)

    async def block() -> None:
        time.sleep(60)

    async def works() -> str:
        return "works"

    async def main() -> str:
        calls = EnvironmentCalls(1.0)
        with pytest.raises(EnvironmentFailure, match="environment: step: no result after 1 s"):
            await calls("step", block)
        calls.timeout = 30.0
        return str(await calls("step", works))

    started = time.monotonic()
    assert asyncio.run(main()) == "works"
    assert time.monotonic() - started < 20


def test_what_hangs_does_not_hold_up_the_end_of_the_program() -> None:
    code = (
        "import asyncio, time\n"
        "from surogate_rl.rollouts.environments.calls import EnvironmentCalls\n"
        "async def block(): time.sleep(600)\n"
        "async def main():\n"
        "    calls = EnvironmentCalls(0.2)\n"
        "    for function in (lambda: time.sleep(600), block):\n"
        "        try: await calls('step', function)\n"
        "        except Exception as error: print(error)\n"
        "    calls.close()\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["environment: step: no result after 0.2 s"] * 2


def test_cancelling_an_episode_closes_its_environment(family: Family) -> None:
    tokenizer = family("qwen2_5")
    environment = Counting(1000)

    async def main() -> None:
        runner = EpisodeRunner(
            engine=Slow(tokenizer),  # type: ignore[arg-type]
            make_environment=lambda: environment,  # type: ignore[arg-type,return-value]
            tokenizer=tokenizer,
            encode=lambda task: encode_prompt(task, tokenizer),
            limits=EpisodeLimits(16, 100000),
        )
        task = Task(0, told("hi"), None, {})
        params = SamplingParams(max_tokens=1, stop_ids=(tokenizer.eos_token_id,))
        running = asyncio.create_task(runner.run(task, runner.encode(task), 0, 0, params))
        async with asyncio.timeout(30):
            while environment.steps == 0:
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()

    asyncio.run(main())
    assert environment.closed == 1
