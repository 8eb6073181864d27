"""Every operation of the CUDA back-end beside the CPU's, on the GPU that is here.

benchmarks/gpu/build_and_test.sh builds what this runs."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.gpu


@pytest.mark.timeout(600)
def test_operations_match_the_cpu() -> None:
    program = Path(os.environ.get("SUROGATE_CUDA_TESTS", ROOT / "build/gpu/surogate_cuda_tests"))
    assert program.exists(), f"{program} is not there: run benchmarks/gpu/build_and_test.sh build, or set SUROGATE_CUDA_TESTS"
    result = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    failures = [line for line in result.stdout.splitlines() if "TOO LARGE" in line or "OUTSIDE" in line or line.startswith("FAILED")]
    assert result.returncode == 0, "\n".join(failures) or result.stderr[-4000:]
