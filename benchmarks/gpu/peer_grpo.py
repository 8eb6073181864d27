"""Times a peer's GRPO script beside ours, with other settings of its trainer if asked for, and adds the most memory in use on the device.

    python benchmarks/gpu/peer_grpo.py SCRIPT TOKENIZER [SIZE] [PROMPTS] [GROUP] [TOKENS] [STEPS] [--set name=value ...]

SCRIPT is a Python file with a function main(tokenizer, size, prompts, group, tokens, steps) that makes a `GRPOConfig` and prints a line of
JSON; --set changes what that gets, in Python's notation (per_device_train_batch_size=64, use_liger_kernel=True).
"""

from __future__ import annotations

import argparse
import ast
import json
from typing import Any

from grpo import DeviceMemory
from peer import load


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("script")
    parser.add_argument("arguments", nargs="+")
    parser.add_argument("--set", action="append", default=[], metavar="name=value")
    given = parser.parse_args()
    peer = load(given.script)
    changes = {name: ast.literal_eval(value) for name, value in (change.split("=", 1) for change in given.set)}
    make = peer.GRPOConfig

    def changed(**arguments: Any) -> Any:
        return make(**(arguments | changes))

    peer.GRPOConfig = changed
    memory = DeviceMemory()
    memory.start()
    peer.main(*given.arguments)
    print(json.dumps({"peer_case": given.arguments[1:], "set": changes, "device_gb": round(memory.stop(), 1)}), flush=True)


if __name__ == "__main__":
    main()
