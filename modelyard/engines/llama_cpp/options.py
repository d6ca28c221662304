"""The llama.cpp engine's own fields of a model definition."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from modelyard.core.engine import CacheInfo, Capabilities

_KvType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
FlashAttentionMode = Literal["on", "off", "auto"]
_Count = Annotated[int, Field(ge=1, le=1 << 24)]

CAPABILITIES = Capabilities(structured=True, logprobs=True, embeddings=True, lora=True, ignored=("beam_size",))

# field → its type with its range: what one load may set for itself, through the admin API
LIVE_OVERRIDES: dict[str, Any] = {
    "n_ctx": _Count,
    "type_k": _KvType,
    "type_v": _KvType,
    "n_gpu_layers": Annotated[int, Field(ge=-1, le=10_000)],
    "n_threads": Annotated[int, Field(ge=1, le=1024)],
    "n_threads_batch": Annotated[int, Field(ge=1, le=1024)],
    "n_batch": _Count,
    "n_ubatch": _Count,
    "flash_attn": Literal["auto", "on", "off"],
    "speculation": Literal["auto", "off", "ngram", "draft"],
    "draft_n_max": Annotated[int, Field(ge=1, le=64)],
}


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
    n_threads_batch: int | None = Field(
        default=None,
        gt=0,
        description="CPU threads where several tokens are computed at once: reading a prompt, several streams; unset "
        "means n_threads.",
    )
    n_batch: int = Field(default=2048, gt=0, description="Tokens handed over at a time.")
    n_ubatch: int = Field(default=512, gt=0, description="Tokens computed at a time: the longest wait of a stream.")
    flash_attn: bool | Literal["auto", "on", "off"] | None = Field(
        default=None,
        validation_alias=AliasChoices("flash_attn", "gguf_flash_attn"),
        description="Flash attention; unset: on with a CPU, on a GPU where all of it can.",
    )
    swa_full: bool = Field(
        default=True,
        description="Keep all KV of layers with a sliding window; false takes less memory, and going back in a "
        "conversation then goes by checkpoints.",
    )
    checkpoints: int = Field(
        default=8,
        ge=0,
        description="For models that cannot go back (recurrent, hybrid, sliding window): states kept a sequence, so "
        "that an edited conversation is not read from its start.",
    )
    checkpoint_mb: int = Field(default=512, ge=0, description="MiB that the checkpoints of one sequence may take.")
    parked_mb: int = Field(
        default=1024,
        ge=0,
        description="MiB of memory a cache for the KV of conversations that had to make room: they come back without "
        "being read anew. 0: they are forgotten.",
    )
    kv_store: bool | str = Field(
        default=False,
        description="Save the KV of every cache when the model is unloaded and restore it when it is loaded: in this "
        "folder, or with true in the user's cache folder. The files hold what was said.",
    )
    kv_store_mb: int = Field(default=4096, gt=0, description="MiB that kv_store may take; the oldest files go first.")
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

    speculation: Literal["auto", "off", "ngram", "draft"] = Field(
        default="auto",
        description="Several tokens a step, by guessing what comes next: from the job's own text (ngram) or with a "
        "draft model (draft). auto guesses only while that measures faster; answers are the same either way.",
    )
    draft_model_path: str | None = Field(
        default=None, description="A small GGUF with the same vocabulary that guesses for this model."
    )
    draft_n_max: int = Field(default=8, gt=0, le=64, description="Tokens that are guessed at a time, at most.")
    draft_p_min: float = Field(
        default=0.75, ge=0, le=1, description="The draft model goes on while its best token is at least this likely."
    )

    replay: str | None = Field(
        default=None,
        description="For tests: a file of scripted answers, said instead of what the model would say. Prompts are read "
        "and cached as ever.",
    )
    lora: dict[str, OneLora] = Field(
        default_factory=dict, description="LoRA adapters by the name that requests ask for: a path, or path and scale."
    )

    @model_validator(mode="after")
    def _draft_needs_a_model(self) -> Options:
        if self.speculation == "draft" and self.draft_model_path is None:
            raise ValueError("speculation = draft needs a draft_model_path")
        return self

    @property
    def drafts(self) -> bool:
        """Whether a draft model is to be loaded."""
        return self.draft_model_path is not None and self.speculation in ("auto", "draft")

    @property
    def stretches(self) -> bool:
        """Whether positions are scaled by these settings."""
        return self.rope_scaling not in (None, "none") or self.rope_freq_base is not None or bool(self.rope_freq_scale)

    def of(self, cache: CacheInfo) -> Options:
        """These, with what a cache sets for itself over them."""
        own = {name: getattr(cache, name) for name in ("n_batch", "n_ubatch", "n_threads", "flash_attn")}
        return self.model_copy(update={name: value for name, value in own.items() if value is not None})


def flash_attention_mode(options: Options, *, gpu: bool) -> FlashAttentionMode:
    """Of a cache's own options; `gpu` where layers may lie on one."""
    asked = options.flash_attn
    if asked is None:
        return "auto" if gpu else "on"
    if isinstance(asked, str):
        return asked
    return "on" if asked else "off"
