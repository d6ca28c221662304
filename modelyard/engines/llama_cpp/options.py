"""The llama.cpp engine's own fields of a model definition."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from modelyard.core.engine import CacheInfo


class Lora(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="The adapter's GGUF file.")
    scale: float = Field(default=1.0, description="Its strength; a request's own scale is a factor to it.")


def _lora(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


OneLora = Annotated[
    Lora,
    BeforeValidator(_lora),
    WithJsonSchema({"anyOf": [{"type": "string"}, Lora.model_json_schema()]}),
]


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    path: str = Field(description="The GGUF file, its folder, or the first file of a split model.")
    n_gpu_layers: int = Field(
        default=-1,
        validation_alias=AliasChoices("n_gpu_layers", "gguf_n_gpu_layers"),
        description="Layers on the GPU; -1 means all that a GPU build can take.",
    )
    n_threads: int | None = Field(default=None, gt=0, description="CPU threads; unset means the physical cores.")
    n_batch: int = Field(default=2048, gt=0, description="Tokens handed over at a time.")
    n_ubatch: int = Field(default=512, gt=0, description="Tokens computed at a time: the longest wait of a stream.")
    flash_attn: bool | Literal["auto", "on", "off"] | None = Field(
        default=None,
        validation_alias=AliasChoices("flash_attn", "gguf_flash_attn"),
        description="Flash attention; unset means what measured better on this kind of machine.",
    )
    use_mmap: bool = Field(default=True, description="Map the file into memory instead of reading it.")
    overcommit: bool = Field(default=False, description="Load even where the estimate says that memory is too small.")
    rope_scaling: Literal["none", "linear", "yarn", "longrope"] | None = Field(
        default=None, description="How positions beyond the trained length are scaled; unset means as the file says."
    )
    rope_freq_base: float | None = Field(default=None, gt=0, description="RoPE base frequency; unset: the file's.")
    rope_freq_scale: float | None = Field(
        default=None, gt=0, description="RoPE frequency factor, 0.5 for twice the trained length; unset: the file's."
    )
    yarn_ext_factor: float | None = Field(default=None, description="YaRN extrapolation mix; unset: the file's.")
    yarn_attn_factor: float | None = Field(default=None, description="YaRN magnitude factor; unset: the file's.")
    yarn_beta_fast: float | None = Field(default=None, description="YaRN low correction dimension; unset: the file's.")
    yarn_beta_slow: float | None = Field(default=None, description="YaRN high correction dimension; unset: the file's.")
    yarn_orig_ctx: int | None = Field(default=None, gt=0, description="YaRN's trained length; unset: the file's.")
    pooling: Literal["mean", "cls", "last"] | None = Field(
        default=None, description="How an embedding is made of its tokens; unset means as the file says, else mean."
    )

    lora: dict[str, OneLora] = Field(
        default_factory=dict, description="LoRA adapters by the name that requests ask for: a path, or path and scale."
    )

    @property
    def stretches(self) -> bool:
        """Whether positions are scaled by these settings."""
        return self.rope_scaling not in (None, "none") or self.rope_freq_base is not None or bool(self.rope_freq_scale)

    def of(self, cache: CacheInfo) -> Options:
        """These, with what a cache sets for itself over them."""
        own = {name: getattr(cache, name) for name in ("n_batch", "n_ubatch", "n_threads", "flash_attn")}
        return self.model_copy(update={name: value for name, value in own.items() if value is not None})
