"""Three tasks with their tiny models, data, teachers and limits. See docs/budget.md for what they are meant to be like.

Every task has a sloppy teacher, whose transcripts a model imitates first (SFT, once for each seed, shared by all arms), and prompts to
learn from by rewards, of very different difficulty, which are visited several times in a run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surogate_rl.rollouts.environments import games

from .games import ALPHABET, Keypad, Letters

PROMPTS, HELD_OUT, TRANSCRIPTS = 128, 128, 4000

# known by name like the project's own games, so that they are called as directly as those
games.GAMES["letters"] = Letters  # type: ignore[assignment]
games.GAMES["keypad"] = Keypad  # type: ignore[assignment]


@dataclass(frozen=True)
class BenchmarkTask:
    """Attributes:
    characters: what the model reads and writes, a token each.
    horizon: turns (single-turn: tokens) that a user of the task would allow.
    context: `sequence_len`.
    environment: the game's name, or None: single-turn.
    """

    name: str
    characters: str
    horizon: int
    context: int
    environment: str | None


TASKS = {
    # the longest code has 8 digits
    "keypad": BenchmarkTask("keypad", "0123456789:.=", 16, 48, "text_game:keypad"),
    # 26 letters take 5 turns at the best
    "letters": BenchmarkTask("letters", ALPHABET + "=?:", 8, 48, "text_game:letters"),
    # the longest answer has 8 digits and an end
    "sorting": BenchmarkTask("sorting", "0123456789=", 16, 32, None),
}


def rows(name: str, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Endless rows: what the policy is asked."""
    while True:
        if name == "letters":
            yield {"prompt": ":", "letters": rng.choice((4, 8, 16, 26)), "seed": rng.randrange(1 << 30)}
            continue
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 8)))
        if len(set(digits)) == 1:
            continue
        if name == "keypad":
            yield {"prompt": digits + ":", "code": digits}
        else:
            yield {"prompt": digits + "=", "answer": "".join(sorted(digits))}


def transcript(name: str, row: dict[str, Any], rng: random.Random) -> dict[str, str]:
    """What the sloppy teacher does with a row."""
    if name == "keypad":
        return {"text": row["prompt"] + _key_in(row["code"], rng)}
    if name == "letters":
        return {"text": row["prompt"] + _search(row["seed"], row["letters"], rng)}
    answer = row["answer"]
    if rng.random() < 0.4:
        return {"prompt": row["prompt"], "completion": answer}
    place = rng.choice([i for i in range(len(answer) - 1) if answer[i] != answer[i + 1]])
    return {"prompt": row["prompt"], "completion": answer[:place] + answer[place + 1] + answer[place] + answer[place + 2 :]}


def _key_in(code: str, rng: random.Random, wrong: float = 0.1) -> str:
    """Presses the right key but with probability `wrong` any of the code's; goes on as if nothing had happened, then any."""
    game, said, left = Keypad(), "", sorted(code)
    game.reset(code)
    for _ in range(TASKS["keypad"].horizon):
        key = rng.choice(code) if not left or rng.random() < wrong else left[0]
        if key in left:
            left.remove(key)
        answer, _, done = game.step(key)
        said += key + answer
        if done:
            break
    return said


def _search(seed: int, letters: int, rng: random.Random, right: float = 0.3) -> str:
    """Takes a letter that is still possible with probability `right`, else any letter of the range."""
    game = Letters()
    said = game.reset(seed, letters)
    for _ in range(TASKS["letters"].horizon):
        guess = rng.randint(game.low, game.high) if rng.random() < right else rng.randrange(letters)
        answer, _, done = game.step(ALPHABET[guess])
        said += ALPHABET[guess] + answer
        if done:
            break
    return said


def write_model(task: BenchmarkTask, directory: Path) -> None:
    """Config and character tokenizer of a model of two layers; no weights."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<end>", "<unk>", *task.characters])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>").save_pretrained(directory)
    LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=0.05,
    ).save_pretrained(directory)


def write_data(task: BenchmarkTask, directory: Path, seed: int) -> None:
    rng = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    source = rows(task.name, rng)
    for name, count in (("heldout", HELD_OUT), ("train", PROMPTS)):
        _write(directory / f"{name}.jsonl", [next(source) for _ in range(count)])
    _write(directory / "demonstrations.jsonl", [transcript(task.name, next(source), rng) for _ in range(TRANSCRIPTS)])


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
