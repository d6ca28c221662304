"""The ExLlamaV3 engine's own fields of a model definition."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

PAGE = 256  # tokens of a page: ExLlamaV3 knows no other size

_Bits = Annotated[int, Field(ge=2, le=8)]
CacheBits = tuple[_Bits, _Bits]
_Pages = Annotated[int, Field(ge=PAGE, le=1 << 24)]
_Chunk = Annotated[int, Field(ge=PAGE, le=1 << 16, multiple_of=PAGE)]


def _bits(value: Any) -> Any:
    """Takes 4, "4", "8,4" and [8, 4]: bits of keys and of values, or of both."""
    if value is None or isinstance(value, bool):
        return value
    listed = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    return tuple(listed) * 2 if len(listed) == 1 else tuple(listed)


def _sizes(value: Any) -> Any:
    """Takes auto, "20,24", 20 and [20, 24]."""
    if value is None or isinstance(value, bool) or value in ("auto", ""):
        return None if value in ("auto", "") else value
    listed = value.split(",") if isinstance(value, str) else value
    return listed if isinstance(listed, list | tuple) else [listed]


CacheQuant = Annotated[
    CacheBits | None,
    BeforeValidator(_bits),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 2, "maximum": 8}, {"type": "string"}, {"type": "null"}]}),
]
GpuSplit = Annotated[
    list[Annotated[float, Field(ge=0)]] | None,
    BeforeValidator(_sizes),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}, {"type": "null"}]}),
]

# field → its type with its range: what one load may set for itself, through the admin API
LIVE_OVERRIDES: dict[str, Any] = {
    "n_ctx": Annotated[int, Field(ge=1, le=1 << 24)],
    "exllama_cache_size": _Pages,
    "exllama_cache_quant": CacheQuant,
    "exllama_gpu_split": GpuSplit,
    "exllama_tensor_parallel": bool,
    "exllama_max_chunk_size": _Chunk,
}


class ExllamaOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="The folder of the quantized model, or its name in the library.")
    exllama_cache_size: _Pages | None = Field(
        default=None,
        description="Tokens that all caches of the model hold together; unset means the windows of all conversations. "
        "More keeps old conversations longer, less lets conversations wait for each other's pages.",
    )
    exllama_cache_quant: CacheQuant = Field(
        default=None,
        description="Bits of cached keys and values, 2 to 8: one number, or two as in 8,4. Unset means 16.",
    )
    exllama_gpu_split: GpuSplit = Field(
        default=None,
        description="GB to use of each GPU, as 20,24; unset or auto means what is free, one after another.",
    )
    exllama_tensor_parallel: bool = Field(default=False, description="Every GPU computes a part of each layer.")
    exllama_tp_backend: Literal["native", "nccl"] = Field(
        default="native", description="How the GPUs of a tensor-parallel model talk to each other."
    )
    exllama_max_batch_size: int | None = Field(
        default=None, gt=0, le=1024, description="Jobs computed together; unset means as many as a cache holds."
    )
    exllama_max_chunk_size: _Chunk = Field(
        default=2048, description="Tokens of a prompt read at a time, in steps of 256: the longest wait of a stream."
    )
    exllama_max_q_size: int = Field(default=8, gt=0, le=256, description="Tokens computed at a time for one stream.")
    exllama_max_rq_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Tokens after which a long answer gives its pages back and queues for new ones; unset: never.",
    )
    exllama_warmup: bool = Field(
        default=True, description="Try every kind of step while loading, so that the first requests do not wait for it."
    )
