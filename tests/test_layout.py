"""How the source tree is laid out: what an archive, a wheel, make and the tools that read the tree rely on."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import surogate_rl

ROOT = Path(__file__).parents[1]
LINKED = ("rewards", "rollouts")
CORE_LINES, FILE_LINES = 15_000, 1_000


def core_files() -> list[Path]:
    return [path for path in sorted((ROOT / "csrc").rglob("*")) if path.is_file()]


def lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def test_the_core_stays_small() -> None:
    sizes = {path: lines(path) for path in core_files()}
    own = sum(size for path, size in sizes.items() if ROOT / "csrc" / "tests" not in path.parents)
    assert 5_000 < own <= CORE_LINES
    assert {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > FILE_LINES} == {}


@pytest.mark.parametrize("folder", LINKED)
def test_links_are_relative_and_lead_to_the_folders(folder: str) -> None:
    link = ROOT / "surogate_rl" / folder
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{folder}"
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", LINKED)
def test_the_package_has_every_file_of_the_folders(folder: str) -> None:
    """Also where it is an installed wheel, which is made without the links."""
    installed = Path(surogate_rl.__file__).parent / folder
    wanted = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py")}
    assert len(wanted) > 10
    assert {str(path) for path in wanted if not (installed / path).is_file()} == set()


@pytest.mark.parametrize("folder", LINKED)
def test_the_bare_name_is_refused(folder: str) -> None:
    result = subprocess.run([sys.executable, "-P", "-c", f"import {folder}"], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert f"surogate_rl.{folder}" in last


def make_variable(name: str) -> set[str]:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    show = ["make", "-s", "--no-print-directory", f"--eval=show-it:; @echo $({name})", "show-it"]
    return set(subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def test_every_source_makes_an_installation_stale() -> None:
    sources = make_variable("SOURCES")
    built = [*core_files(), *(ROOT / "cmake").iterdir(), *(p for folder in LINKED for p in (ROOT / folder).rglob("*.py"))]
    built += [p for p in (ROOT / "surogate_rl").rglob("*.py") if p.relative_to(ROOT).parts[1] not in LINKED]
    assert {str(path.relative_to(ROOT)) for path in built} <= {source.replace("//", "/") for source in sources}


def test_every_file_of_the_core_is_formatted() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout: make asks git for the files")
    tracked = subprocess.run(["git", "ls-files", "csrc"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {Path(name).suffix for name in tracked} == {".cpp", ".h", ".cu", ".cuh", ".inc"}
    assert make_variable("CPP_FILES") == set(tracked)
