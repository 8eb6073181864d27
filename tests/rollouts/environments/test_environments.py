"""What can be named as an environment: built-in games, adapters, the user's own; and what is said of what cannot."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from surogate_rl.rollouts.environments import check_environment, gives_rewards, make_environments, parse_name
from surogate_rl.rollouts.environments.games import DIRECTIONS, HiddenCode, KeyDoor, NumberGuess
from surogate_rl.rollouts.environments.named import EnvironmentConfigError, seed_of
from surogate_rl.rollouts.manager import Group
from surogate_rl.rollouts.types import Episode, EpisodeLimits, Task
from surogate_rl.trainers.rollout_log import RolloutLog

Family = Callable[[str], Any]
OWN = Path(__file__).parent / "own_environments.py"


def task(**columns: Any) -> Task:
    return Task(3, [{"role": "user", "content": "hi"}], None, columns)


@pytest.fixture
def run(family: Family, play: Callable[..., Any]) -> Callable[..., Episode]:
    def run(name: str, turns: list[str], args: dict[str, Any] | None = None, limit: int = 9, **columns: Any) -> Episode:
        tokenizer = family("qwen2_5")
        environments = make_environments(name, args or {}, tokenizer)
        limits = EpisodeLimits(64, 4096, max_turns=limit)
        episode: Episode = play(tokenizer, environments.make, turns, task=task(**columns), limits=limits, inline=environments.inline)[0]
        return episode

    return run


def contents(episode: Episode, role: str = "user") -> list[str]:
    return [message["content"] for message in episode.messages if message["role"] == role]


# ---- games ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_halving_finds_the_number_within_the_stated_turns(seed: int) -> None:
    game = NumberGuess(1, 100)
    game.reset(seed)
    low, high = 1, 100
    for _ in range(7):
        middle = (low + high) // 2
        said, reward, done = game.step(f"I say {middle}")
        if done:
            assert (said, reward) == ("Right!", 1.0)
            return
        assert reward == 0.0
        low, high = (middle + 1, high) if "higher" in said else (low, middle - 1)
    pytest.fail("not found within 7 turns")


@pytest.mark.parametrize("seed", range(20))
def test_the_code_is_among_those_that_fit_every_answer(seed: int) -> None:
    """Answers are those of an independent count over all codes; guessing among the codes that fit ends at the secret."""
    import itertools

    game = HiddenCode(3, 4, terse=True)
    assert game.reset(seed) == ""
    left = ["".join(code) for code in itertools.product("0123", repeat=3)]
    rng = random.Random(seed)
    for _ in range(20):
        guess = rng.choice(left)
        said, reward, done = game.step(guess)
        if done:
            assert (said, reward) == ("=", 1.0)
            return

        def answer(code: str, guess: str = guess) -> str:
            placed = [i for i in range(3) if code[i] == guess[i]]
            rest = [code[i] for i in range(3) if i not in placed]
            elsewhere = 0
            for i in range(3):
                if i not in placed and guess[i] in rest:
                    rest.remove(guess[i])
                    elsewhere += 1
            return f"{len(placed)}{elsewhere}"

        left = [code for code in left if code != guess and answer(code) == said]
    pytest.fail("no code fits the answers")


@pytest.mark.parametrize("seed", range(20))
def test_a_room_can_be_left_in_the_shortest_number_of_turns_and_no_fewer(seed: int) -> None:
    """Breadth-first over (place, key) by playing the game itself."""
    first = KeyDoor(4, 3)
    first.reset(seed)
    waiting: list[list[str]] = [[]]
    seen = set()
    while waiting:
        path = waiting.pop(0)
        game = KeyDoor(4, 3, key_reward=0.1)
        game.reset(seed)
        done, rewards = False, []
        for move in path:
            _, reward, done = game.step(move)
            rewards.append(reward)
        if done:
            assert len(path) == first.shortest
            assert sorted(rewards)[-2:] == [0.1, 1.0]
            return
        state = (game._at, game._has_key)
        if state not in seen:
            seen.add(state)
            waiting += [[*path, move] for move in DIRECTIONS]
    pytest.fail("the room cannot be left")


def test_games_understand_words_and_say_what_they_do_not(run: Callable[..., Episode]) -> None:
    door = KeyDoor(3, 0, terse=True)
    place = door.reset(5)
    assert len(place) == 4
    assert door.step("what?") == ("?", 0.0, False)
    assert door.step("I go u then LEFT")[1] in (0.0, 1.0)
    assert NumberGuess().step("none")[0] == "That is no number. Guess again."
    assert HiddenCode(3, 6).step("12")[0] == "That is no code of 3 digits. Try again."
    episode = run("text_game:number_guess", ["1", "2", "3", "4"], {"low": 1, "high": 4}, seed=8)
    assert (episode.error, episode.cut, episode.environment_reward) == (None, None, 1.0)
    assert episode.turn_rewards == [0.0] * (episode.turns - 1) + [1.0]
    assert contents(episode)[:2] == ["hi", "I think of a number from 1 to 4. Guess it; answer with a number only."]


def test_all_episodes_of_a_task_play_the_same_game(run: Callable[..., Episode]) -> None:
    rooms = {run("text_game:key_door", ["up"], limit=1, seed=4).messages[1]["content"] for _ in range(3)}
    assert len(rooms) == 1
    assert rooms != {run("text_game:key_door", ["up"], limit=1, seed=5).messages[1]["content"]}
    assert seed_of(task(seed=4)) == 4
    assert seed_of(task()) == seed_of(task()) != seed_of(Task(4, None, "", {}))
    assert 0 <= seed_of(task()) < 1 << 31


# ---- adapters and the user's own --------------------------------------------------------------------------------------------------------


def test_a_users_game_gets_columns_by_name(run: Callable[..., Episode]) -> None:
    episode = run(f"text_game:{OWN}:Countdown", ["x"], start=2, seed=9)
    assert (episode.error, episode.turns, episode.environment_reward) == (None, 2, 1.0)
    assert contents(episode) == ["hi", "2 (9)", "1", "0"]
    assert run(f"text_game:{OWN}:BadGame", ["x"], start=2).error == (
        "environment: step: TypeError: step returned 'only text', expected (observation as text, reward, done)"
    )


def test_a_missing_column_is_named_before_the_run(family: Family) -> None:
    environments = make_environments(f"text_game:{OWN}:Countdown", {}, family("qwen2_5"))
    environments.check_columns([task(start=1)])
    with pytest.raises(
        EnvironmentConfigError, match=r"asks for a column 'start', which task 3 .* \(columns: started; did you mean 'started'"
    ):
        environments.check_columns([task(started=1)])


def test_gymnasium(run: Callable[..., Episode]) -> None:
    won = run(f"gym:{OWN}:Gymnasium", ["no", "x" * 42], seed=6)
    assert (won.error, won.cut, won.turn_rewards) == (None, None, [-0.1, 1.0])
    assert contents(won) == ["hi", "seed 6", '{"place": [1, 2]}', '{"place": [2, 42]}']
    late = run(f"gym:{OWN}:Gymnasium", ["no"], {"limit": 2})
    assert (late.turns, late.cut, late.truncated, late.turn_rewards) == (2, "turns", True, [-0.1, -0.1])


def test_gym_of_old(run: Callable[..., Episode]) -> None:
    done = run(f"gym:{OWN}:OldGym", ["a", "b"])
    assert (done.error, done.turns, done.cut, contents(done)) == (None, 2, None, ["hi", "start", "a", "b"])
    assert run(f"gym:{OWN}:OldGym", ["a", "late"]).cut == "turns"


def test_openenv(run: Callable[..., Episode]) -> None:
    episode = run(f"gym:{OWN}:make_client", ["go"])
    assert (episode.error, episode.turns, episode.environment_reward) == (None, 2, 1.0)
    assert contents(episode) == ["hi", "ready", "go!", "go!"]
    inside = run(f"gym:{OWN}:OpenEnvInProcess", ["go"])
    assert (inside.error, inside.turns, inside.environment_reward, contents(inside)) == (None, 1, 3.0, ["hi", "ready", "go"])


def test_gymnasium_itself(run: Callable[..., Episode], tmp_path: Path) -> None:
    """A real environment of the package, with actions and observations in words."""
    pytest.importorskip("gymnasium")
    (tmp_path / "lake.py").write_text(
        "import gymnasium\n"
        "class Lake(gymnasium.Wrapper):\n"
        "    def __init__(self, limit=None):\n"
        "        super().__init__(gymnasium.make('FrozenLake-v1', is_slippery=False, max_episode_steps=limit))\n"
        "    def text_to_action(self, text): return ['left', 'down', 'right', 'up'].index(text)\n"
        "    def observation_to_text(self, observation): return f'square {observation}'\n"
    )
    path = ["down", "down", "right", "right", "down", "right"]
    episode = run(f"gym:{tmp_path / 'lake.py'}:Lake", path)
    assert (episode.error, episode.turns, episode.environment_reward, episode.cut) == (None, 6, 1.0, None)
    assert contents(episode)[1:3] == ["square 0", "square 4"]
    assert run(f"gym:{tmp_path / 'lake.py'}:Lake", ["left"], {"limit": 3}).cut == "turns"


def test_a_users_own(run: Callable[..., Episode]) -> None:
    episode = run(f"{OWN}:Echo", ["ab", "abc"], {"prefix": "say "}, word="it")
    assert (episode.error, episode.turns, episode.turn_rewards, episode.environment_reward) == (None, 2, [2.0, 3.0], 5.0)
    assert contents(episode) == ["hi", "say it", "ab", "abc"]


def test_text_that_no_encoding_can_hold_is_replaced_where_it_comes_in(run: Callable[..., Episode], family: Family, tmp_path: Path) -> None:
    said = run(f"{OWN}:Undecodable", ["go", "parts"])
    assert (said.error, said.turns, said.environment_reward) == (None, 2, 2.0)
    assert contents(said) == ["hi", "name-\ufffd", "\ufffd!", "\ufffd!"]
    assert said.messages[-2] == {
        "role": "assistant",
        "content": "parts\ufffd",
        "tool_calls": [{"type": "function", "function": {"name": "list-\ufffd", "arguments": {"in\ufffd": ["\ufffd"]}}}],
    }
    raised = run(f"{OWN}:Undecodable", ["raise"])
    assert raised.error == "environment: step: FileNotFoundError: no such file: name-\ufffd"
    nested = run(f"{OWN}:Nested", ["go"])
    assert nested.error == "environment: step: a message: it is nested more than 64 levels deep"
    # what the environment keeps for itself is replaced where it is written
    RolloutLog(tmp_path, family("qwen2_5")).write(1, [Group(said.task, [said, raised, nested])])
    rows = pq.read_table(tmp_path / "step-00000001.parquet").to_pylist()
    assert [row["error"] for row in rows] == [None, raised.error, nested.error]
    assert json.loads(rows[0]["info"]) == {"files-\ufffd": 1.0}
    assert json.loads(rows[0]["messages"]) == said.messages


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("chess", {}, "unknown environment 'chess'; known: single_turn, tools, text_game:<game>"),
        ("tool", {}, "unknown environment 'tool'; did you mean 'tools'?"),
        (
            "text_game",
            {},
            "write text_game:number_guess|hidden_code|key_door or text_game:path/file.py:Class",
        ),
        ("text_game:number_gues", {}, "unknown text_game 'number_gues'; did you mean 'number_guess'?"),
        ("text_game:number_guess", {"hi": 5}, "with environment.args it cannot be made: got an unexpected keyword argument 'hi'"),
        ("text_game:number_guess", {"low": 5, "high": 5}, "args: number_guess: low is 5 and high is 5, expected low < high"),
        ("gym:CartPole-v1", {}, "unknown gym 'CartPole-v1'; write gym:path/file.py:Class"),
        ("gym:nowhere.py:Class", {}, "there is no file"),
        ("single_turn", {"a": 1}, "args: a: single_turn takes none; remove them"),
        ("single_turn:x", {}, "single_turn takes nothing after a colon"),
        ("mine.py", {}, "'mine.py' names a file; write mine.py:Class"),
        ("tools", {}, "args.tools: tools needs it"),
        ("tools", {"tools": []}, "args.tools: the list is empty"),
        ("tools", {"tools": "a.py:f", "time_out": 3}, "args.time_out: tools has no such option; did you mean 'timeout'?"),
        ("tools", {"tools": "a.py:f", "timeout": "3"}, "args.timeout: '3': Input should be a valid number"),
        ("tools", {"tools": "a.py:f", "workers": 0}, "args.workers: 0, expected a number greater than 0"),
        (
            "tools",
            {"tools": "a.py:f", "format": "xml"},
            "args.format: 'xml': Input should be 'auto', 'hermes', 'llama3'",
        ),
        (f"{OWN}:NoStep", {}, "has no method step and no close; it needs reset, step, close"),
        (f"gym:{OWN}:NoStep", {}, "has no method step; it needs reset, step"),
        (f"{OWN}:Ecko", {}, "has no 'Ecko'; did you mean 'Echo'?"),
        (f"{OWN}:Echo", {"turn": 1}, "with environment.args it cannot be made: got an unexpected keyword argument 'turn'"),
        ("verifiers:nothing-of-this-name", {}, "verifiers"),
    ],
)
def test_what_cannot_be_used_is_named(family: Family, name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentConfigError) as error:
        make_environments(name, args, family("qwen2_5"))
    assert message in str(error.value)


def test_names_and_who_gives_rewards() -> None:
    assert parse_name("a/b.py:C") == ("user", "a/b.py:C")
    assert parse_name("gym:a/b.py:C") == ("gym", "a/b.py:C")
    judged = ["single_turn", "tools"]
    rewarding = ["text_game:key_door", "gym:a.py:C", "verifiers:x", "a.py:C"]
    assert [gives_rewards(name) for name in judged + rewarding] == [False, False, True, True, True, True]
    check_environment("gym:not/there.py:Class", {"anything": 1})  # what is in it is seen when it is loaded
