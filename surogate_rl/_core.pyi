"""The native core. Arrays are C-contiguous numpy arrays; what a call returns is an owned copy; calls release the GIL."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

class ModelSpec:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    norm_eps: float
    activation: str
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied: bool
    rope_inv_freq: list[float]
    rope_attention_scale: float
    windows: list[int]
    def __init__(self, **fields: Any) -> None: ...
    def validate(self) -> None: ...  # ValueError that names the field

class StepStats:
    grad_norm: float
    applied: bool
    step: int

class Learner:
    def __init__(
        self,
        spec: ModelSpec,
        *,
        max_tokens: int,
        device: str = "cpu",  # or "cuda", "cuda:1", ...
        threads: int = 0,
        deterministic: bool = False,  # cuda: same inputs, same bits
        head_rows: int = 0,  # rows of logits computed at a time; 0: as many as make 256 MiB (bfloat16: 1 or 2 GiB)
        trainable: bool = True,
        recompute: bool = False,
        keep_logits: bool = False,  # all rows' between forward and backward
        head_gradient_in_forward: bool = False,  # with a frozen head: no second product over the vocabulary for backward
        border_adapters: bool = False,  # a linear and its adapters as one product
        lend_gradients: bool = False,  # their memory holds activations until they are written; one backward per step
        profile: bool = False,  # cuda: a table of the time of each operation
        recipe: str = "float32",  # of weights and activations; or "bfloat16", on cuda
        logits_dtype: str = "",  # "float32", "bfloat16"; "": as the recipe
        gradient_dtype: str = "float32",  # or "bfloat16"
        optimizer_state_dtype: str = "float32",  # or "bfloat16"
        master_weights: bool = True,  # bfloat16: what is trained in float32 too; else updates are rounded stochastically
        lora_rank: int = 0,
        lora_alpha: float = 0.0,
        lora_targets: Sequence[str] = (),  # "q_proj" ... "down_proj", "lm_head"
        seed: int = 0,
        memory_limit: int = 0,
    ) -> None: ...
    @staticmethod
    def plan(spec: ModelSpec, **options: Any) -> list[tuple[str, int]]: ...
    def score(
        self,
        tokens: I32,
        positions: I32,
        cu_seqlens: I32,
        targets: I32,
        *,
        temperature: float = 1.0,
        valid_vocab: int = 0,
        entropy: bool = False,
        adapter: str = "live",
    ) -> tuple[F32, F32 | None]: ...
    def forward(
        self,
        tokens: I32,
        positions: I32,
        cu_seqlens: I32,
        targets: I32,
        *,
        temperature: float = 1.0,
        valid_vocab: int = 0,
        entropy: bool = False,
    ) -> tuple[F32, F32 | None]: ...
    def backward(self, dlogp: F32, dentropy: F32 | None = None) -> None: ...
    def forward_backward(
        self,
        tokens: I32,
        positions: I32,
        cu_seqlens: I32,
        targets: I32,
        dlogp: F32,
        dentropy: F32 | None = None,
        *,
        temperature: float = 1.0,
        valid_vocab: int = 0,
    ) -> tuple[F32, F32 | None]: ...
    def discard_pending(self) -> None: ...
    def step(
        self,
        learning_rate: float,
        *,
        max_grad_norm: float = 0.0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> StepStats: ...
    def zero_gradients(self) -> None: ...
    def tensors(self) -> list[tuple[str, tuple[int, ...], bool]]: ...  # name, shape, trainable
    def load(self, name: str, value: F32) -> None: ...
    def export(self, name: str) -> F32: ...
    def export_to(self, places: Sequence[tuple[str, int]], dtype: str) -> None: ...  # name, address on the learner's device
    def gradient(self, name: str) -> F32: ...
    def add_to_gradient(self, name: str, value: F32) -> None: ...  # sums over ranks
    def optimizer_state(self) -> list[tuple[str, tuple[int, ...]]]: ...  # "<name>.exp_avg", "<name>.exp_avg_sq"
    def load_optimizer(self, name: str, value: F32) -> None: ...
    def export_optimizer(self, name: str) -> F32: ...
    update_count: int
    def snapshot_adapter(self) -> None: ...
    def memory(self) -> list[tuple[str, int]]: ...
    def workspace_bytes(self) -> int: ...  # that the back-end took for itself, beside memory()

class Generator:
    """Shares the learner's weights and keeps the learner alive."""

    def __init__(
        self,
        learner: Learner,
        *,
        max_sequences: int = 32,
        cache_tokens: int = 0,
        block_size: int = 16,
        valid_vocab: int = 0,
        prefill_chunk: int = 256,
    ) -> None: ...
    @staticmethod
    def plan(
        spec: ModelSpec,
        *,
        max_sequences: int = 32,
        cache_tokens: int = 0,
        block_size: int = 16,
        valid_vocab: int = 0,
        prefill_chunk: int = 256,
        lora_rank: int = 0,
    ) -> list[tuple[str, int]]: ...
    def add(
        self,
        id: int,
        prompt: I32,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> None: ...
    def abort(self, id: int) -> bool: ...
    def step(self) -> list[tuple[int, int, float, str | None]]: ...  # id, token, logp, finish: None, "stop", "length"
    def unfinished(self) -> int: ...
    def weights_changed(self) -> None: ...
    @property
    def preemptions(self) -> int: ...  # times that a running sequence had to make room and was computed again
    @property
    def cache_tokens(self) -> int: ...  # as taken: rounded up to whole blocks
    def memory(self) -> list[tuple[str, int]]: ...

def cuda_available() -> bool: ...  # whether a learner can be made with device="cuda"
def cuda_unavailable_reason() -> str: ...  # why not, and what to do; "" if it can
def available_memory(device: str) -> int: ...  # bytes that a learner there could take now
def blas_name() -> str: ...
