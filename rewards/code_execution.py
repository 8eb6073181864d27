"""code_execution: the completion's Python program gives the right results, in a sandbox."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surogate_rl.rewards.extract import after_thinking, last_tag
from surogate_rl.rewards.sandbox import Finished, Sandbox

_FENCE = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)

# Runs inside: hands each list of arguments to the function and writes what it returns, a JSON line each. The right results stay
# outside, so that a program can do no better than compute them.
_HARNESS = """
import json, os, sys
job = json.load(sys.stdin)
out = os.fdopen(os.dup(1), "w")
os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
names = {"__name__": "solution"}
with open("/tmp/solution.py", encoding="utf-8") as file:
    exec(compile(file.read(), "solution.py", "exec"), names)
for arguments in job["arguments"]:
    try:
        line = json.dumps({"value": names[job["function"]](*arguments)})
    except Exception:
        line = "{}"
    out.write(line + "\\n")
    out.flush()
"""


@dataclass(frozen=True)
class CodeExecution:
    """1.0 if the completion's program passes all tests of the column ``tests``, else 0.0.

    The program is the last fenced code block, else the last ``<answer>``; without either the reward is 0.0. ``tests`` is a list of

    * ``{"input": text, "output": text}``: given this standard input it prints this, white space at the ends of lines apart; or
    * ``{"function": name, "args": [...], "output": value}``: the function called so returns this (as JSON; floats to 1e-9).

    An exit code proves nothing: what it printed or returned is compared, outside of the sandbox. A program that uses up `cpu_seconds` or
    its memory fails; one that is still there after `wall_seconds` may be the victim of a busy machine: unscored. If the sandbox cannot be
    set up nothing is run, and the run does not start. None where the row has no tests.

    Options:
        partial: the share of tests passed instead of all or nothing.
        cpu_seconds, wall_seconds, memory_mb, file_mb, processes: limits of one run of the program; see `Sandbox`.
    """

    partial: bool = False
    cpu_seconds: int = 5
    wall_seconds: float = 30.0
    memory_mb: int = 512
    file_mb: int = 16
    processes: int = 16

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "wall_seconds", "memory_mb", "file_mb", "processes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected more than 0")

    @property
    def sandbox(self) -> Sandbox:
        return Sandbox(self.cpu_seconds, self.wall_seconds, self.memory_mb, self.file_mb, self.processes)

    def load(self) -> None:
        self.sandbox.check()

    def __call__(self, completion: str, tests: Sequence[Mapping[str, Any]] | None) -> float | None:
        if not tests:
            return None
        for test in tests:
            if "output" not in test or ("input" in test) == ("function" in test):
                raise ValueError(f"a test must be {{input, output}} or {{function, args, output}}, got the keys {sorted(test)}")
        program = find_program(completion)
        if program is None:
            return 0.0
        passed = asked = 0
        for function, group in _by_function(tests).items():
            passed += self._programs(program, group) if function is None else self._functions(program, function, group)
            asked += len(group)
            if passed < asked and not self.partial:
                return 0.0
        return passed / len(tests)

    def _programs(self, program: str, tests: Sequence[Mapping[str, Any]]) -> int:
        passed = 0
        for test in tests:
            if self._prints(program, test):
                passed += 1
            elif not self.partial:
                break
        return passed

    def _prints(self, program: str, test: Mapping[str, Any]) -> bool:
        result = self.sandbox.run(program, str(test["input"]))
        _not_too_late(result)
        return result.status == "exit" and result.code == 0 and _lines(result.stdout) == _lines(str(test["output"]))

    def _functions(self, program: str, function: str, tests: Sequence[Mapping[str, Any]]) -> int:
        job = {"function": function, "arguments": [list(test.get("args", [])) for test in tests]}
        result = self.sandbox.run(_HARNESS, json.dumps(job), {"solution.py": program})
        _not_too_late(result)
        lines = result.stdout.splitlines()
        return sum(_returned(line, test["output"]) for line, test in zip(lines, tests, strict=False))


def find_program(completion: str) -> str | None:
    """The last fenced block after the thinking, else the last <answer>, else None."""
    fenced = _FENCE.findall(after_thinking(completion))
    return fenced[-1] if fenced else last_tag(completion, "answer")


def _by_function(tests: Sequence[Mapping[str, Any]]) -> dict[str | None, list[Mapping[str, Any]]]:
    groups: dict[str | None, list[Mapping[str, Any]]] = {}
    for test in tests:
        groups.setdefault(test.get("function"), []).append(test)
    return groups


def _not_too_late(result: Finished) -> None:
    if result.deadline:
        raise TimeoutError("the program was still there at its deadline, with processor time to spare")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _returned(line: str, expected: Any) -> bool:
    try:
        answer = json.loads(line)
    except ValueError:
        return False
    return isinstance(answer, dict) and "value" in answer and same(answer["value"], json.loads(json.dumps(expected)))


def same(found: Any, expected: Any) -> bool:
    """Equality of JSON values; true is not 1, and floats may differ by 1e-9 of themselves."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, int | float) and isinstance(expected, int | float):
        if isinstance(found, int) and isinstance(expected, int):
            return found == expected
        return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(same(one, other) for one, other in zip(found, expected, strict=True))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in found)
    return type(found) is type(expected) and bool(found == expected)
