"""reasoning_gym: the task's own verdict."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surogate_rl.rewards.extract import Extract, find_answer

#: Modules whose scorers evaluate the answer as a Python literal, by `eval`. They get `ast.literal_eval` instead.
_EVALUATING = ("algorithmic.string_insertion", "algorithmic.spiral_matrix", "algorithmic.binary_matrix", "games.n_queens")
#: Tasks whose scorers hand the answer to sympy's parser, which can run any Python. They see arithmetic only.
_PARSING = frozenset({"simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown"})
_FUNCTIONS = "sin|cos|tan|sec|csc|cot|asin|acos|atan|sinh|cosh|tanh|exp|log|ln|sqrt|Abs|pi"
_ARITHMETIC = re.compile(rf"(?:\b(?:{_FUNCTIONS})\b|\b[A-Za-z]\b|[0-9]+(?:\.[0-9]*)?|\.[0-9]+|[-+*/^(),=\s])*")


@dataclass(frozen=True)
class ReasoningGymTask:
    """The score that the reasoning_gym task gives the answer: 0 to 1, partial where the task knows such.

    Takes the columns ``reasoning_gym`` ({task, args}) and ``entry`` that ``reasoning_gym/<task>`` data sets have. An answer at which the
    task's scorer stumbles counts as wrong, provided that it can score the right answer; otherwise its exception is passed on. Answers
    are never run as code: scorers that would do so are given literals or plain arithmetic only.

    Options:
        extract: where the answer stands in the completion; see `find_answer`.
        exact: 1.0 for a full score, 0.0 for any other.
    """

    extract: Extract = "auto"
    exact: bool = False

    def __post_init__(self) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ImportError("needs the package reasoning-gym: pip install reasoning-gym")

    def load(self) -> None:
        for name in _EVALUATING:
            vars(importlib.import_module(f"reasoning_gym.{name}"))["eval"] = ast.literal_eval

    def __call__(self, completion: str, reasoning_gym: Mapping[str, Any], entry: Mapping[str, Any]) -> float:
        dataset = _dataset(reasoning_gym["task"], json.dumps(reasoning_gym.get("args") or {}, sort_keys=True))
        answer = find_answer(completion, self.extract)
        source = entry.get("metadata", {}).get("source_dataset", reasoning_gym["task"])
        if answer is not None and source in _PARSING and not _ARITHMETIC.fullmatch(answer):
            return 0.0
        try:
            score = float(dataset.score_answer(answer, entry))
        except (TimeoutError, MemoryError):
            raise
        except Exception:
            dataset.score_answer(entry["answer"], entry)
            return 0.0
        return float(score >= 1.0) if self.exact else score


@functools.lru_cache(maxsize=64)
def _dataset(task: str, arguments: str) -> Any:
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import create_dataset

    args = json.loads(arguments)
    if task == "composite":
        args["datasets"] = [DatasetSpec(part["name"], part.get("weight", 1.0), part.get("config", {})) for part in args["datasets"]]
    return create_dataset(task, **args, size=1, seed=0)
