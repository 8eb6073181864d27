"""Log-probabilities are written by the engine core as vLLM itself would write them, in vLLM's own interpreter."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from surogate_rl.rollouts.engines.vllm import process

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROGRAM = """
import numpy as np, torch
from surogate_vllm import packed_logprobs
from vllm.v1 import outputs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

tensors = outputs.LogprobsTensors(torch.arange(6, dtype=torch.int32).view(6, 1), torch.randn(6, 1), torch.arange(6))
plain = tensors.tolists()
assert packed_logprobs.install()
packed = tensors.tolists()
assert isinstance(packed, packed_logprobs.PackedLogprobs)
for first, count in ((0, 1), (5, 1), (2, 3)):
    found = []
    for lists in (plain, packed):
        output = EngineCoreOutput(request_id="a", new_token_ids=[1], new_logprobs=lists.slice_request(first, count))
        found.append(MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output])))
    assert [bytes(part) for part in found[0][1:]] == [bytes(part) for part in found[1][1:]]
    (one,), (other,) = (MsgpackDecoder(EngineCoreOutputs).decode(each).outputs for each in found)
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(one.new_logprobs[:3], other.new_logprobs[:3]))
several = outputs.LogprobsTensors(*tensors[:3], [0, 2, 4]).tolists()
assert len(several.slice_request(1, 2).logprobs) == 2, "several tokens a step are vLLM's own business"
packed_logprobs._RAW += 1
assert not packed_logprobs.install(), "a vLLM that writes something else is left alone"
print("good")
"""


def test_the_bytes_are_vllms_own(vllm_python: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(process.__file__).parent / "host"), "VLLM_LOGGING_LEVEL": "ERROR"}
    ran = subprocess.run([vllm_python, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert ran.stdout.strip().endswith("good"), ran.stderr[-4000:]
