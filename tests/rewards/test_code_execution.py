"""The code sandbox: what programs can and cannot do in it, and that results are what counts."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from surogate_rl.config.schema import RewardConfig
from surogate_rl.rewards import RewardError, load_rewards
from surogate_rl.rewards.code_execution import CodeExecution, find_program, same
from surogate_rl.rewards.sandbox import Sandbox, SandboxUnavailable
from surogate_rl.rollouts.types import Episode, Task

SANDBOX = Sandbox(cpu_seconds=2, wall_seconds=20.0)


def sandbox_works() -> bool:
    try:
        SANDBOX.check()
    except SandboxUnavailable:
        return False
    return True


WORKS = sandbox_works()
needs_sandbox = pytest.mark.skipif(not WORKS, reason="this kernel gives no namespaces to this user; see test_refuses_without_a_sandbox")


@needs_sandbox
def test_a_program_sees_nothing_of_the_machine(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0o666)
    program = f"""
import os, socket
def tried(action):
    try:
        return action() or "yes"
    except OSError as error:
        return error.strerror
print(tried(lambda: open({str(secret)!r}).read()))
print(tried(lambda: open({str(secret)!r}, "w").close()))
print(tried(lambda: open("/usr/new", "w").close()))
print(tried(lambda: open("/etc/passwd").read()))
print(tried(lambda: os.listdir("/proc")))
print(tried(lambda: socket.create_connection(("127.0.0.1", 9), 1)))
print(tried(lambda: socket.create_connection(("192.0.2.1", 80), 1)))
print(tried(lambda: os.unshare(0x10000000)) if hasattr(os, "unshare") else "-")
print(os.getuid() != 0, os.getpid(), sorted(os.environ), os.listdir("/tmp"))
print([n for n in range(3, 64) if not tried(lambda: os.fstat(n)) == "Bad file descriptor"])
"""
    result = SANDBOX.run(program)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    missing = "No such file or directory"
    assert lines[:7] == [missing, missing, "Read-only file system", missing, missing, "Network is unreachable", "Network is unreachable"]
    assert lines[8] == "True 2 ['HOME', 'LANG', 'PATH', 'PYTHONDONTWRITEBYTECODE', 'PYTHONHASHSEED'] ['main.py']"
    assert lines[9] == "[]"
    assert secret.read_text() == "x"


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "status", "error"),
    [
        ("while True: pass", "time", ""),
        ("x = bytearray(10 ** 10)", "exit", "MemoryError"),
        ("open('/tmp/x', 'wb').write(bytes(10 ** 8))", "exit", "No space left on device"),
        ("while True: print('x' * 10 ** 6)", "output", ""),
        ("import os\nwhile True: os.fork()", "exit", "Resource temporarily unavailable"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "killed", ""),
        ("import os\nos.setuid(0)", "exit", "OSError|PermissionError"),
    ],
)
def test_limits(program: str, status: str, error: str) -> None:
    result = SANDBOX.run(program)
    assert result.status == status
    assert not result.deadline
    assert any(part in result.stderr for part in error.split("|"))


@needs_sandbox
def test_what_a_program_leaves_behind_is_killed() -> None:
    result = Sandbox(wall_seconds=20.0).run(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.closerange(0, 3)\n    time.sleep(12345)\nprint('done')"
    )
    assert (result.status, result.stdout) == ("exit", "done\n")
    deadline = Sandbox(wall_seconds=3.0).run("import time\ntime.sleep(12345)")
    assert (deadline.status, deadline.deadline) == ("time", True)
    end = time.monotonic() + 30
    while time.monotonic() < end and sandboxed():
        time.sleep(0.05)
    assert sandboxed() == []


def sandboxed() -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "pid"]):
        command = process.info["cmdline"] or []
        if "/tmp/main.py" in command or any(part.endswith("sandbox_child.py") for part in command):
            found.append(process.info["pid"])
    return found


def fenced(program: str) -> str:
    return f"<think>hm</think>Here:\n```python\n{program}\n```\n"


ADD = [{"function": "add", "args": [1, 2], "output": 3}, {"function": "add", "args": [2, 2], "output": 4}]
ECHO = [{"input": "a\nb\n", "output": "b\na"}, {"input": "c\n", "output": "c\n"}]


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        ("def add(a, b): return a + b", ADD, 1.0),
        ("def add(a, b):\n    print('noise')\n    return a + b", ADD, 1.0),
        ("def add(a, b): return a * b", ADD, 0.5),
        ("def add(a, b): return str(a + b)", ADD, 0.0),
        ("def add(a, b):\n    if a == 2: raise ValueError\n    return 3", ADD, 0.5),
        ("def other(): pass", ADD, 0.0),
        ("syntax error(", ADD, 0.0),
        ("import os; os._exit(0)", ADD, 0.0),
        ("raise SystemExit(0)", ADD, 0.0),
        ("class Liar:\n    def __eq__(self, other): return True\ndef add(a, b): return Liar()", ADD, 0.0),
        ("print('{\"value\": 3}')", ADD, 0.0),
        ("import sys\nprint(*reversed(sys.stdin.read().split()), sep='\\n')", ECHO, 1.0),
        ("print('c')", ECHO, 0.5),
        ("import sys\nprint(*reversed(sys.stdin.read().split()), sep='\\n')\nsys.exit(1)", ECHO, 0.0),
        ("import os; os._exit(0)", ECHO, 0.0),
        ("while True: pass", ECHO[:1], 0.0),
    ],
)
def test_results_count(program: str, tests: list[dict[str, Any]], expected: float) -> None:
    reward = CodeExecution(partial=True, cpu_seconds=1)
    assert reward(fenced(program), tests) == expected
    assert CodeExecution(cpu_seconds=1)(fenced(program), tests) == float(expected == 1.0)


def test_no_program_and_no_tests() -> None:
    assert CodeExecution()("no code here", ADD) == 0.0
    assert CodeExecution()(fenced("x"), []) is None
    assert CodeExecution()(fenced("x"), None) is None
    with pytest.raises(ValueError, match=r"a test must be \{input, output\} or \{function, args, output\}, got the keys \['code'\]"):
        CodeExecution()(fenced("x"), [{"code": "assert True"}])
    assert find_program("```python\na\n```\n```\nb\n```") == "b\n"
    assert find_program("<answer>c</answer>") == "c"
    assert find_program("<think>```python\na\n```</think> none") is None


def test_equality_of_values() -> None:
    assert same({"a": [1, 2.0, None, "x"]}, {"a": [1, 2.0 + 1e-12, None, "x"]})
    assert same(3, 3.0)
    assert not same(True, 1)
    assert not same([1, 2], [1])
    assert not same({"a": 1}, {"b": 1})
    assert not same("1", 1)
    assert not same(2**60, 2**60 + 1)


@needs_sandbox
def test_a_sleeping_program_is_unscored() -> None:
    config = RewardConfig(name="code_execution", args={"wall_seconds": 5.0})
    episodes = [
        Episode(Task(0, None, "", {"tests": ADD}), 0, 0, completion=fenced(program))
        for program in ("import time\ntime.sleep(1000)", "def add(a, b): return a + b")
    ]
    with load_rewards([config]) as runner:
        asyncio.run(runner.score(episodes))
    assert [episode.reward for episode in episodes] == [None, 1.0]
    error = episodes[0].error
    assert error is not None
    assert re.fullmatch(
        r"reward 'code_execution': timeout: gave up after \d+\.\d s: the program was still there at its deadline, "
        "with processor time to spare",
        error,
    )


def test_refuses_without_a_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the kernel refuses, nothing is run: not in a single call, and the run does not even start."""
    target = tmp_path / "ran"
    if WORKS:
        script = Path(__file__).parents[2] / "rewards" / "sandbox_child.py"
        locked = tmp_path / "sandbox_child.py"
        locked.write_text(script.read_text().replace("libc.unshare(NEWUSER |", "libc.unshare(0x7F0000FF |"))
        monkeypatch.setattr("surogate_rl.rewards.sandbox.__file__", str(tmp_path / "sandbox.py"))
    with pytest.raises(SandboxUnavailable, match=r"does not work here \(.*new namespaces.*\); code is never run outside of it"):
        Sandbox().run(f"open({str(target)!r}, 'w')")
    assert not target.exists()
    if not WORKS:
        with pytest.raises(RewardError, match="'code_execution' could not be loaded in a worker process"):
            load_rewards(["code_execution"])


def test_nothing_but_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="the code sandbox needs Linux, not darwin; code is never run outside of it"):
        Sandbox().run("print(1)")


def test_options() -> None:
    with pytest.raises(ValueError, match="cpu_seconds is 0, expected more than 0"):
        CodeExecution(cpu_seconds=0)
    assert os.path.isfile(Path(__file__).parents[2] / "rewards" / "sandbox_child.py")
