"""Data: sources, types of rows, chat templates, masks, packing."""

from surogate_rl.data.load import Pair, load_examples, load_pairs
from surogate_rl.data.packing import PackSequence, pack
from surogate_rl.data.report import DataError, DataReport, DatasetReport, Loaded
from surogate_rl.data.tasks import load_tasks
from surogate_rl.data.template import Example, encode_prompt

__all__ = [
    "DataError",
    "DataReport",
    "DatasetReport",
    "Example",
    "Loaded",
    "PackSequence",
    "Pair",
    "encode_prompt",
    "load_examples",
    "load_pairs",
    "load_tasks",
    "pack",
]
