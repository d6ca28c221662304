"""The ExLlamaV3 engine's options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

PAGE = 256  # tokens per page: ExLlamaV3 has no other size

_Bits = Annotated[int, Field(ge=2, le=8)]
CacheBits = tuple[_Bits, _Bits]  # of keys and of values
_CacheTokens = Annotated[int, Field(ge=PAGE, le=1 << 24)]
_ChunkTokens = Annotated[int, Field(ge=PAGE, le=1 << 16, multiple_of=PAGE)]


def _parse_bits(value: Any) -> Any:
    """Accepts 4, "4", "8,4" and [8, 4]: bits of keys and of values, or of both."""
    if value is None or isinstance(value, bool):
        return value
    bits = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    return tuple(bits) * 2 if len(bits) == 1 else tuple(bits)


def _parse_sizes(value: Any) -> Any:
    """Accepts auto, "20,24", 20 and [20, 24]."""
    if value is None or isinstance(value, bool):
        return value
    if value in ("auto", ""):
        return None
    sizes = value.split(",") if isinstance(value, str) else value
    return sizes if isinstance(sizes, list | tuple) else [sizes]


CacheQuant = Annotated[
    CacheBits | None,
    BeforeValidator(_parse_bits),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 2, "maximum": 8}, {"type": "string"}, {"type": "null"}]}),
]
GpuSplit = Annotated[
    list[Annotated[float, Field(ge=0)]] | None,
    BeforeValidator(_parse_sizes),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}, {"type": "null"}]}),
]

# Option → type and range: what a single load may override through the admin API.
LIVE_OVERRIDES: dict[str, Any] = {
    "n_ctx": Annotated[int, Field(ge=1, le=1 << 24)],
    "exllama_cache_size": _CacheTokens,
    "exllama_cache_quant": CacheQuant,
    "exllama_gpu_split": GpuSplit,
    "exllama_tensor_parallel": bool,
    "exllama_max_chunk_size": _ChunkTokens,
}


class ExllamaOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="The folder of the quantized model, or its name in the library.")
    exllama_cache_size: _CacheTokens | None = Field(
        default=None,
        description="Tokens that all caches of the model hold together; unset: the windows of all conversations. More "
        "keeps old conversations longer; with less, conversations wait for each other's pages.",
    )
    exllama_cache_quant: CacheQuant = Field(
        default=None,
        description="Bits of cached keys and values, 2 to 8: one number, or two as in 8,4. Unset: 16.",
    )
    exllama_gpu_split: GpuSplit = Field(
        default=None,
        description="GB to use of each GPU, as in 20,24. Unset or auto: the free memory, one GPU after another.",
    )
    exllama_tensor_parallel: bool = Field(default=False, description="Every GPU computes a part of each layer.")
    exllama_tp_backend: Literal["native", "nccl"] = Field(
        default="native", description="How the GPUs of a tensor-parallel model communicate."
    )
    exllama_max_batch_size: int | None = Field(
        default=None, gt=0, le=1024, description="Jobs computed together; unset: as many as a cache holds."
    )
    exllama_max_chunk_size: _ChunkTokens = Field(
        default=2048,
        description="Tokens of a prompt read in one step, a multiple of 256: the longest time that other streams wait.",
    )
    exllama_max_q_size: int = Field(default=8, gt=0, le=256, description="Tokens computed at a time for one stream.")
    exllama_max_rq_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Tokens after which a long answer releases its pages and queues for new ones; unset: never.",
    )
    exllama_warmup: bool = Field(
        default=True, description="Run every kind of step while loading, so that the first requests are not slower."
    )
