"""Times a peer's training script beside ours, in the same call, and adds the memory that it reserved.

    python benchmarks/gpu/peer.py SCRIPT CASE ...

SCRIPT is a Python file with a function train(size, lora, recompute, compile, batch, sequence, accumulation) that prints a line of JSON;
CASE is SIZE,lora|full,recompute,compile,BATCH,SEQUENCE,ACCUMULATION.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
from typing import Any


def load(path: str) -> Any:
    found = importlib.util.spec_from_file_location("peer_script", path)
    if found is None or found.loader is None:
        raise SystemExit(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def main() -> None:
    import torch

    peer = load(sys.argv[1])
    for case in sys.argv[2:]:
        size, mode, recompute, compiled, batch, sequence, accumulation = case.split(",")
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            peer.train(size, mode == "lora", recompute == "1", compiled == "1", int(batch), int(sequence), int(accumulation))
            reserved = torch.cuda.max_memory_reserved() / 1e9
            print(json.dumps({"peer_case": case, "reserved_gb": round(reserved, 2)}), flush=True)
        except Exception as error:  # out of memory, mostly
            print(case, "FAILED", repr(error)[:300], flush=True)


if __name__ == "__main__":
    main()
