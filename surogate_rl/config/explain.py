"""What a key takes, in words, and which key an unknown one was meant to be. Both come from the schema alone."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from surogate_rl.config.errors import KeyPath, path_text
from surogate_rl.config.schema import CONFIGS, Command

Node = dict[str, Any]

# Names that other trainers use for ours.
_ALIASES: dict[str, str] = {
    "model_name_or_path": "model",
    "base_model": "model",
    "model_path": "model",
    "model_name": "model",
    "dataset": "datasets",
    "dataset_name": "datasets",
    "train_dataset": "datasets",
    "data": "datasets",
    "tokenizer_name_or_path": "tokenizer",
    "max_seq_length": "sequence_len",
    "max_seq_len": "sequence_len",
    "max_length": "sequence_len",
    "cutoff_len": "sequence_len",
    "context_length": "sequence_len",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "steps": "max_steps",
    "batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "scheduler": "lr_scheduler_type",
    "lr_scheduler": "lr_scheduler_type",
    "warmup": "warmup_ratio",
    "gradient_clipping": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "gradient_checkpointing": "recompute",
    "optim": "optimizer",
    "bf16": "recipe",
    "fp16": "recipe",
    "dtype": "recipe",
    "torch_dtype": "recipe",
    "use_lora": "lora",
    "lora_r": "lora_rank",
    "target_modules": "lora_target_modules",
    "resume_from_checkpoint": "resume",
    "eval_dataset": "eval.datasets",
    "eval_steps": "eval.steps",
    "reward_funcs": "rewards",
    "reward_functions": "rewards",
    "reward_weights": "rewards",
    "group_size": "rollouts.num_generations",
    "max_new_tokens": "rollouts.max_completion_length",
    "max_tokens": "rollouts.max_completion_length",
    "use_vllm": "rollouts.engine",
    "kl_coef": "loss.beta",
    "ppo_epochs": "loss.num_iterations",
    "importance_sampling_level": "loss.loss_type",
    "vllm_importance_sampling_correction": "loss.mismatch",
}


@cache
def schema_of(command: Command) -> Node:
    """The command's JSON schema."""
    return CONFIGS[command].model_json_schema()


def node_at(command: Command, path: KeyPath) -> Node | None:
    """The schema of the value at ``path``, or None where the schema knows none."""
    root = schema_of(command)
    node: Node = root
    for part in path:
        found = None
        for option in _options(root, node):
            if isinstance(part, int):
                found = option.get("items")
            else:
                extra = option.get("additionalProperties")
                found = option.get("properties", {}).get(part) or (extra if isinstance(extra, dict) else None)
            if found is not None:
                break
        if found is None:
            return None
        node = found
    return node


def _options(root: Node, node: Node) -> Iterator[Node]:
    """The node itself with references followed, or the members of a union."""
    if "$ref" in node:
        yield from _options(root, root["$defs"][node["$ref"].rpartition("/")[2]])
    elif "anyOf" in node:
        for member in node["anyOf"]:
            yield from _options(root, member)
    else:
        yield node


def keys_at(command: Command, path: KeyPath) -> list[str]:
    """Keys of the section at ``path``."""
    node = node_at(command, path)
    keys: list[str] = []
    if node is not None:
        for option in _options(schema_of(command), node):
            keys.extend(option.get("properties", {}))
    return keys


def expects(command: Command, path: KeyPath) -> str:
    """``a number greater than 0``, ``one of group, batch, none``, ``a list of text or all-linear``..."""
    node = node_at(command, path)
    return "a known key" if node is None else words(schema_of(command), node)


def takes(command: Command, path: KeyPath, kind: str) -> bool:
    """Whether the value may be of this JSON type: ``number``, ``boolean``, ``string``, ``array``, ``object``."""
    node = node_at(command, path)
    return node is not None and any(option.get("type") == kind for option in _options(schema_of(command), node))


def enum_values(command: Command, path: KeyPath) -> list[str]:
    """The words that the value may be, if it may be one of a few."""
    node = node_at(command, path)
    options = list(_options(schema_of(command), node)) if node is not None else []
    return [str(value) for option in options for value in option.get("enum", [option["const"]] if "const" in option else [])]


def words(root: Node, node: Node) -> str:
    """A schema node in words; null is not mentioned."""
    parts = [_words(root, option) for option in _options(root, node) if option.get("type") != "null"]
    return " or ".join(dict.fromkeys(parts)) or "nothing"


def _words(root: Node, option: Node) -> str:
    if "const" in option:
        return str(option["const"])
    if "enum" in option:
        return "one of " + ", ".join(str(value) for value in option["enum"])
    kind = option.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _bounds(option)
    if kind == "array":
        items = words(root, option["items"]) if option.get("items") else "values"
        plural = {"a section": "sections", "a number": "numbers"}.get(items, items)
        return f"a list of {plural}" if not items.startswith("one of ") else f"a list of {items[7:]}"
    return {"boolean": "true or false", "string": "text", "object": "a section"}.get(str(kind), "any value")


def _bounds(option: Node) -> str:
    lower, upper = option.get("minimum"), option.get("maximum")
    above, below = option.get("exclusiveMinimum"), option.get("exclusiveMaximum")
    if lower is not None and upper is not None:
        return f" from {lower:g} to {upper:g}"
    parts = []
    if above is not None:
        parts.append(f"greater than {above:g}")
    if lower is not None:
        parts.append(f"of at least {lower:g}")
    if below is not None:
        parts.append(f"less than {below:g}")
    if upper is not None:
        parts.append(f"at most {upper:g}")
    return " " + " and ".join(parts) if parts else ""


def got(value: Any) -> str:
    """What the user wrote, short: ``'abc'``, ``true``, ``nothing``, ``a list``..."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    if isinstance(value, dict):
        return "a section" + (f" ({', '.join(map(str, list(value)[:4]))})" if value else " without keys")
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return str(value)


def nearest(name: str, choices: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The choice that looks most like ``name``, or None."""
    folded = {choice.lower().replace("-", "_"): choice for choice in reversed(choices)}
    matches = difflib.get_close_matches(name.lower().replace("-", "_"), list(folded), n=1, cutoff=cutoff)
    return folded[matches[0]] if matches else None


def all_keys(command: Command) -> list[KeyPath]:
    """Every key, sections' keys after the section; keys of list items without their index."""
    paths: list[KeyPath] = []

    def visit(node: Node, path: KeyPath) -> None:
        for option in _options(schema_of(command), node):
            if "items" in option:
                visit(option["items"], path)
            for key, child in option.get("properties", {}).items():
                paths.append((*path, key))
                visit(child, (*path, key))

    visit(schema_of(command), ())
    return paths


def unknown_key(command: Command, path: KeyPath) -> str:
    """The message about a key that the command does not have."""
    section, key = path[:-1], str(path[-1])
    others = [(other, _place(other, section, key)) for other in CONFIGS if other != command]
    owners = [(other, place) for other, place in others if place is not None]
    candidates = _meant(command, section, key, fuzzy=not owners)
    if owners:
        text = f"'{path_text(path)}' is a key of {' and '.join(other for other, _ in owners)}"
        text += f" ('{owners[0][1]}')" if owners[0][1] != path_text(path) else ""
        return f"{text}, not of {command}; " + (f"did you mean {candidates}?" if candidates else "remove it")
    if candidates:
        return f"unknown key '{path_text(path)}'; did you mean {candidates}?"
    keys = keys_at(command, section)
    listing = f"{path_text(section)} takes {', '.join(keys)}" if section and keys else "docs/config.md lists every key"
    return f"unknown key '{path_text(path)}'; {listing}"


def _place(command: Command, section: KeyPath, key: str) -> str | None:
    """Where the command has a key of exactly this name: in the same section, at the top, or in one of its own sections."""
    if key in keys_at(command, section):
        return path_text((*section, key))
    if section:
        return None
    found = [path_text(path) for path in all_keys(command) if path[-1] == key and path[0] in ("loss", "rollouts")]
    return found[0] if found else None


def _meant(command: Command, section: KeyPath, key: str, *, fuzzy: bool) -> str:
    """Keys that the unknown one may stand for, quoted; without ``fuzzy`` only those of the same name or with a known other name."""
    known = {path_text(path) for path in all_keys(command)}
    folded = key.lower().replace("-", "_")
    found: list[str] = []
    close = nearest(key, keys_at(command, section), cutoff=0.75) if fuzzy else None
    if close is not None:
        found.append(path_text((*section, close)))
    alias = _ALIASES.get(folded)
    if alias in known:
        found.append(str(alias))
    # A section's key written at the top, or the other way round; sections within lists (datasets) are not meant.
    lists = ("datasets.", "rewards.", "eval.datasets.", "eval.rewards.")
    elsewhere = [name for name in known if name.rpartition(".")[2] == folded and not name.startswith(lists)]
    found.extend(sorted(elsewhere, key=lambda name: (name.startswith("eval."), name)))
    if not found and fuzzy:
        close = nearest(key, keys_at(command, section), cutoff=0.65)
        if close is not None:
            found.append(path_text((*section, close)))
    return " or ".join(f"'{name}'" for name in list(dict.fromkeys(found))[:2])
