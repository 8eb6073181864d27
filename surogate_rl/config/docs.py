"""docs/config.md from the schema: ``python -m surogate_rl.config.docs [docs/config.md]``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from surogate_rl.config.explain import words
from surogate_rl.config.schema import (
    CONFIGS,
    BudgetConfig,
    Command,
    DatasetConfig,
    DepthBudgetConfig,
    DynamicSamplingConfig,
    EnvironmentConfig,
    EvalConfig,
    PolicyLossConfig,
    PreferenceLossConfig,
    RewardConfig,
    RolloutsConfig,
    SftLossConfig,
    TrainConfig,
    VllmConfig,
    WidthBudgetConfig,
)

_HEAD = """# Configuration

One YAML file per run: `surogate-rl sft|dpo|grpo config.yaml`. This page is made from the schema
(`python -m surogate_rl.config.docs docs/config.md`).

* Unknown and duplicate keys, wrong types and combinations that cannot work are errors; all of a file are shown at once, each with its line.
* Numbers are what they look like: `1e-5` and `5E-6` are numbers, only `true` and `false` are booleans, `no` is text.
* A plain string in `datasets` stands for `{path: string}`, in `rewards` for `{name: string}`; `loss: dapo` stands for `{loss_type: dapo}`,
  `environment: tools` for `{name: tools}`.
* `--set rollouts.num_generations=16` replaces a key, `--set datasets.0.path=rows.jsonl` one of a list's items. It may be repeated.
* `--dry-run` prints every key with its value, the memory plan and the steps, and loads nothing.
* Paths of files count from the folder of the configuration if there is something, else from the folder you start in; `output_dir` and what
  is given by `--set` count from the folder you start in.
* A run writes its configuration, with every default filled in, to `output_dir/config.yaml`; that file runs as it stands.
* From Python: `surogate_rl.sft(config)`, `dpo(config)`, `grpo(config, rewards=[function])` take the same keys as a dict, a configuration
  object, or the path of a file.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "see below"
    if value is None:
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def _table(model: type[BaseModel], skip: frozenset[str] = frozenset()) -> list[str]:
    schema = model.model_json_schema()
    lines = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if name not in skip:
            takes = words(schema, schema["properties"][name])
            lines.append(f"| `{name}` | {_cell(takes)} | {_cell(_default(field))} | {_cell(field.description or '')} |")
    return lines


def render() -> str:
    """The whole page."""
    common = frozenset(TrainConfig.model_fields)
    parts = [_HEAD, "## Keys of every command", "", *_table(TrainConfig), ""]
    titles: dict[Command, str] = {"sft": "Keys of sft", "dpo": "Keys of dpo", "grpo": "Keys of grpo"}
    for command, title in titles.items():
        own = CONFIGS[command]
        changed = {name for name in common if own.model_fields[name].default != TrainConfig.model_fields[name].default}
        parts += [f"## {title}", "", *_table(own, common - changed), ""]
    sections: list[tuple[str, type[BaseModel]]] = [
        ("`datasets`: a list of", DatasetConfig),
        ("`eval`", EvalConfig),
        ("`rewards`: a list of", RewardConfig),
        ("`rollouts`", RolloutsConfig),
        ("`rollouts.vllm`", VllmConfig),
        ("`environment`", EnvironmentConfig),
        ("`rollouts.dynamic_sampling`", DynamicSamplingConfig),
        ("`rollouts.budget`", BudgetConfig),
        ("`rollouts.budget.depth`", DepthBudgetConfig),
        ("`rollouts.budget.width`", WidthBudgetConfig),
        ("`loss` of sft", SftLossConfig),
        ("`loss` of dpo", PreferenceLossConfig),
        ("`loss` of grpo", PolicyLossConfig),
    ]
    for title, model in sections:
        parts += [f"## {title}", "", *_table(model), ""]
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(render(), encoding="utf-8")
    else:
        print(render(), end="")
