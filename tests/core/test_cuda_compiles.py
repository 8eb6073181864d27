"""The CUDA sources compile, also where there is no GPU: with nvcc for one architecture, without optimisation.

A source whose headers (cuBLAS, cuDNN, cudnn-frontend) are not here is left out, and the reason says which."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for path in (ROOT / "csrc/backend/cuda").iterdir() if path.suffix in {".cu", ".cpp"})
# What a source needs beyond the toolkit, by the header that it names itself or through a header of ours.
LIBRARIES = {
    "cublasLt.h": "nvidia-cublas",
    "cudnn.h": "nvidia-cudnn-cu13",
    "cudnn_frontend.h": "nvidia-cudnn-frontend",
    "nvrtc.h": "nvidia-cuda-nvrtc",
}


def toolkit() -> Path | None:
    """The folder of the toolkit whose nvcc is on the PATH."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    # nvcc may be a wrapper; it knows itself where it lies.
    dry = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True, check=False)
    found = re.search(r"^#\$ TOP=(.+)$", dry.stderr, re.MULTILINE)
    return Path(found.group(1)).resolve() if found else Path(nvcc).resolve().parents[1]


def include_folders(top: Path) -> list[Path]:
    folders = [top / "include"]
    for entry in [*map(Path, filter(None, sys.path)), Path(sys.prefix)]:
        folders += [entry / "nvidia/cu13/include", entry / "nvidia/cublas/include", entry / "nvidia/cudnn/include"]
        folders.append(entry / "nvidia/cuda_nvrtc/include")
        if (entry / "include/cudnn_frontend.h").exists():
            folders.append(entry / "include")
    folders.append(Path("/usr/include"))
    return [folder for folder in folders if folder.is_dir()]


def headers_of(source: Path) -> set[str]:
    """Headers of libraries that a source includes, also through headers of ours."""
    found: set[str] = set()
    seen: set[Path] = set()
    pending = [source]
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r"#include <(\w+\.h)>", text)) & LIBRARIES.keys()
        pending += [own for name in re.findall(r'#include "([\w/.]+)"', text) if (own := ROOT / "csrc" / name).exists()]
    return found | ({"nvrtc.h"} if "cudnn_frontend.h" in found else set())  # which that one includes


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_source_compiles(source: Path, tmp_path: Path) -> None:
    top = toolkit()
    if top is None:
        pytest.skip("nvcc is not on the PATH")
    folders = include_folders(top)
    for header in sorted(headers_of(source)):
        if not any((folder / header).exists() for folder in folders):
            pytest.skip(f"{header} is not here; pip install --no-deps {LIBRARIES[header]}")
    includes = [f"-I{ROOT / 'csrc'}"]
    for folder in folders:
        if folder != Path("/usr/include"):
            includes += ["-isystem", str(folder)]
    if source.suffix == ".cu":
        command = ["nvcc", "-std=c++20", "-gencode", "arch=compute_90a,code=sm_90a", "-O0", "-Xptxas", "-O0", "-c"]
        command += ["-o", str(tmp_path / "out.o")]
    else:
        command = ["c++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-DCUDNN_FRONTEND_SKIP_JSON_LIB"]
    result = subprocess.run([*command, *includes, str(source)], capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr


def test_there_are_sources() -> None:
    names = {path.name for path in SOURCES}
    assert {"cuda_backend.cu", "linear.cu", "attention.cu", "attention_graphs.cpp", "norm.cu", "logprob.cu", "optimizer.cu"} <= names
