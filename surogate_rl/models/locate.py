"""From what the user wrote as `model` to a local directory in Hugging Face form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from surogate_rl.files import user_path
from surogate_rl.models.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*"]
_WEIGHT_FILES = ["model*.safetensors"]


def is_gguf(path: str | Path) -> bool:
    return str(path).lower().endswith(".gguf")


def local_directory(path: str, *, weights: bool) -> Path:
    """The directory of a model: itself, that of a config.json, or a hub id's snapshot (downloaded if need be).

    Raises:
        ModelError: there is no such directory, and the hub cannot give it.
    """
    local = user_path(path)
    if local.is_dir():
        return local
    if local.name == "config.json" and local.is_file():
        return local.parent
    if local.exists():
        raise ModelError(f"model {path!r} is a file; expected a Hugging Face directory, a hub id or a .gguf file")
    if is_gguf(path):
        raise ModelError(f"model {path!r}: there is no such file; check the path (a GGUF file must be on this machine)")
    if not _HUB_ID.fullmatch(path):
        raise ModelError(f"model {path!r}: there is no such directory; check the path")
    return _from_hub(path, weights=weights)


def _from_hub(repo: str, *, weights: bool) -> Path:
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=_SMALL_FILES + (_WEIGHT_FILES if weights else [])))
    except Exception as error:  # the hub's client raises many unrelated types; each ends here with what to do
        offline = " HF_HUB_OFFLINE is set and it is not in the local cache;" if constants.HF_HUB_OFFLINE else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {repo!r}: there is no such directory here, and the Hugging Face hub could not give it;{offline} check the spelling, "
            f"the network and (for a gated model) your login, or give the path of a local directory or GGUF file ({reason})"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelError: it is not there, or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; the directory must hold a model in Hugging Face form") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
