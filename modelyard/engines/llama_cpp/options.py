"""The llama.cpp engine's own fields of a model definition."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from modelyard.core.engine import CacheInfo


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

    def of(self, cache: CacheInfo) -> Options:
        """These, with what a cache sets for itself over them."""
        own = {name: getattr(cache, name) for name in ("n_batch", "n_ubatch", "n_threads", "flash_attn")}
        return self.model_copy(update={name: value for name, value in own.items() if value is not None})
