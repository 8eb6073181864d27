"""json_schema: the completion is JSON that fits a schema."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass, field
from typing import Any

from surogate_rl.rewards.extract import find_answer

_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class JsonSchema:
    """1.0 if the completion's JSON is valid under the schema, `invalid` if it is JSON that is not, 0.0 if it is not JSON.

    The JSON is the last fenced code block, else the last ``<answer>``, else all that follows the thinking. NaN and Infinity are not JSON,
    and neither is an object with the same key twice. References are resolved within the schema, never over the network.

    Options:
        schema: a JSON schema (of the draft that its ``$schema`` names, else the newest); required.
        invalid: see above.
    """

    schema: dict[str, Any] = field()
    invalid: float = 0.0

    def __post_init__(self) -> None:
        if importlib.util.find_spec("jsonschema") is None:
            raise ImportError("needs the package jsonschema: pip install jsonschema")
        import jsonschema

        try:
            jsonschema.validators.validator_for(self.schema).check_schema(self.schema)
        except jsonschema.SchemaError as error:
            raise ValueError(f"schema is no valid JSON schema: {error.message} (at {error.json_path})") from error

    def load(self) -> None:
        import jsonschema  # noqa: F401

    def __call__(self, completion: str) -> float:
        import jsonschema
        import referencing

        fenced = _FENCE.findall(completion)
        text = fenced[-1] if fenced else find_answer(completion, "auto")
        try:
            value = json.loads(text or "", parse_constant=_refuse, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError):
            return 0.0
        validator = jsonschema.validators.validator_for(self.schema)(self.schema, registry=referencing.Registry())
        return 1.0 if validator.is_valid(value) else self.invalid


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result
