"""Loading: from a path, hub id or GGUF file to a spec, a tokenizer and a stream of weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from surogate_rl import _core
from surogate_rl.files import user_path
from surogate_rl.models.errors import ModelError
from surogate_rl.models.family import Family, SpecFields, weight_shapes
from surogate_rl.models.gguf import converted_gguf, earlier_conversion, gguf_config, plain_config
from surogate_rl.models.locate import is_gguf, local_directory, read_json
from surogate_rl.models.registry import family_of
from surogate_rl.models.tokenizer import count_ids, find_stop_ids, load_tokenizer
from surogate_rl.models.weights import Checkpoint, RandomWeights, SafetensorsWeights, WeightSource, head_is_tied

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelInfo:
    """What a model is, by its config alone.

    Attributes:
        spec: for the core.
        family: its ``model_type``.
        hf_config: the transformers config.
        parameters: number of weights, a tied head counted once.
        path: as given.
    """

    spec: _core.ModelSpec
    family: str
    hf_config: PretrainedConfig
    parameters: int
    path: str


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be put into a Learner; its weights are still on disk.

    Attributes:
        spec: for the core.
        family: its ``model_type``.
        hf_config: the transformers config; ``tie_word_embeddings`` says what the files hold.
        tokenizer: with the chat template that was asked for.
        generation_config: the checkpoint's, or None. Its sampling settings are never applied by themselves.
        valid_vocab: how many leading ids the tokenizer has, at most ``spec.vocab``.
        stop_ids: every id that ends a completion, ascending.
        parameters: number of weights, a tied head counted once.
        path: as given.
        source: opens the stream of :meth:`weights`.
    """

    spec: _core.ModelSpec
    family: str
    hf_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    generation_config: GenerationConfig | None
    valid_vocab: int
    stop_ids: tuple[int, ...]
    parameters: int
    path: str
    source: WeightSource

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Streams (the core's name, float32 array) of every weight; each call starts anew. At most one tensor is in memory."""
        return self.source()


@dataclass(frozen=True)
class _Described:
    directory: Path
    family: Family
    config: PretrainedConfig
    fields: SpecFields


def describe(config: PretrainedConfig, raw: Mapping[str, Any], where: str) -> tuple[Family, SpecFields]:
    """The family of a config and the fields of its ModelSpec. ``raw`` is config.json as it lies in the file: transformers fills in defaults
    (of ``rope_theta`` for one) where a silent default would be a wrong model."""
    family = family_of(raw, where)
    try:
        return family, family.spec_fields(config, raw)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error


def _describe_directory(directory: Path) -> _Described:
    where = str(directory)
    raw = read_json(directory / "config.json")
    family_of(raw, where)  # before transformers sees it: for an unknown model_type this message says more
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers' strict configs raise types of their own for a wrong field
        raise ModelError(f"{directory / 'config.json'}: transformers refuses this config ({str(error).strip()})") from error
    family, fields = describe(config, raw, where)
    return _Described(directory, family, config, fields)


def inspect_model(path: str, *, tokenizer: str | None = None, init: Literal["pretrained", "random"] = "pretrained") -> ModelInfo:
    """What a model is, from its config; no weights are read (a hub id's config is downloaded if need be).

    Args:
        tokenizer: if given, checked to be usable.

    Raises:
        ModelError: as :func:`load_model`.
    """
    if tokenizer is not None:
        load_tokenizer(tokenizer)
    local = user_path(path)
    made = earlier_conversion(local) if is_gguf(path) and local.is_file() else None
    if made is None and is_gguf(path) and local.is_file():
        config = gguf_config(local)
        family, fields = describe(config, plain_config(config), path)
    else:
        described = _describe_directory(made or local_directory(path, weights=False))
        family, config, fields = described.family, described.config, described.fields
        # A head that differs from the embedding unties the model; its memory must be planned for.
        if init == "pretrained" and fields["tied"] and any(described.directory.glob("model*.safetensors")):
            fields = fields | {"tied": head_is_tied(Checkpoint(described.directory), True)}
    return ModelInfo(_core.ModelSpec(**fields), family.model_type, config, _count(fields), path)


def _count(fields: SpecFields) -> int:
    return sum(math.prod(shape) for shape in weight_shapes(fields).values())


def count_sampled_ids(path: str, vocab: int, *, tokenizer: str | None = None) -> int:
    """:attr:`LoadedModel.valid_vocab` of a model that :func:`inspect_model` accepts, without its weights; 0, which stands for the whole
    vocabulary, where the tokenizer of a GGUF file has not been unpacked yet.

    Args:
        vocab: rows of the model's embedding.

    Raises:
        ModelError: there is no usable tokenizer.
    """
    if tokenizer is None and is_gguf(path):
        made = earlier_conversion(user_path(path))
        if made is None:
            return 0
        tokenizer = str(made)
    return count_ids(load_tokenizer(tokenizer if tokenizer is not None else path), vocab)


def load_model(
    path: str,
    *,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    init: Literal["pretrained", "random"] = "pretrained",
    seed: int = 0,
) -> LoadedModel:
    """Finds a model, checks it whole, and prepares its weights to be streamed.

    Args:
        path: a directory in Hugging Face form (safetensors, sharded or not; bf16, fp16 or fp32), a hub id, or a GGUF file, which is
            unpacked once into the user's cache.
        tokenizer: directory or hub id, if not the model's own.
        chat_template: Jinja text or a file, if not the tokenizer's own.
        init: ``random``: fresh weights by the config's ``initializer_range``; only config.json and a tokenizer are needed.
        seed: of the fresh weights.

    Raises:
        ModelError: there is no such model; its family or one of its options is not supported; a file, shard or tensor is missing, damaged
            or of the wrong shape; or there is no usable tokenizer.
    """
    if init not in ("pretrained", "random"):
        raise ModelError(f"init must be 'pretrained' or 'random', got {init!r}")
    local = user_path(path)
    directory = converted_gguf(local) if is_gguf(path) and local.is_file() else local_directory(path, weights=init == "pretrained")
    described = _describe_directory(directory)
    config, fields = described.config, described.fields
    source: WeightSource
    if init == "random":
        source = RandomWeights(
            weight_shapes(fields), initializer_range=float(getattr(config, "initializer_range", None) or 0.02), seed=seed
        )
    else:
        checkpoint = Checkpoint(directory)
        if fields["tied"] and not head_is_tied(checkpoint, True):
            logger.warning("%s: the head differs from the embedding although config.json says tied; both are kept", directory)
            fields = fields | {"tied": False}
            config.tie_word_embeddings = False
        source = SafetensorsWeights(checkpoint, weight_shapes(fields))
    spec = _core.ModelSpec(**fields)
    loaded_tokenizer = load_tokenizer(
        tokenizer if tokenizer is not None else str(directory),
        chat_template=chat_template,
        why="" if tokenizer is not None else " beside the model",
    )
    generation = _generation_config(directory)
    return LoadedModel(
        spec=spec,
        family=described.family.model_type,
        hf_config=config,
        tokenizer=loaded_tokenizer,
        generation_config=generation,
        valid_vocab=count_ids(loaded_tokenizer, fields["vocab"]),
        stop_ids=find_stop_ids(config, generation, loaded_tokenizer, fields["vocab"]),
        parameters=_count(fields),
        path=path,
        source=source,
    )


def _generation_config(directory: Path) -> GenerationConfig | None:
    path = directory / "generation_config.json"
    if not path.is_file():
        return None
    read_json(path)
    try:
        config: GenerationConfig = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{path}: transformers refuses this generation config ({str(error).strip()})") from error
    return config
