"""Options of the llama.cpp engine in a model definition."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Struct, structs
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from modelyard.core.engine import CacheInfo, Capabilities
from modelyard.library.gguf import ModelPurpose

# type of a KV cache → ggml's number of it, and the bytes of one value; -1: the library is asked, as none had it yet
KV_TYPES = {
    "f32": (0, 4.0),
    "f16": (1, 2.0),
    "q4_0": (2, 18 / 32),
    "q4_1": (3, 20 / 32),
    "q5_0": (6, 22 / 32),
    "q5_1": (7, 24 / 32),
    "q8_0": (8, 34 / 32),
    "iq4_nl": (20, 18 / 32),
    "bf16": (30, 2.0),
    "f8_e4m3": (-1, 1.0),
    "f8_e5m2": (-1, 1.0),
}
_KvType = Literal["f32", "f16", "bf16", "f8_e4m3", "f8_e5m2", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
FlashAttentionMode = Literal["on", "off", "auto"]
_Count = Annotated[int, Field(ge=1, le=1 << 24)]
GpuLayers = Annotated[int, Field(ge=-1, le=10_000)] | Literal["auto"]

# Rows of a prompt in one step if their log probabilities are wanted: memory is reserved for their logits, and other
# streams wait for them.
LOGIT_ROWS = 16
MAX_SEQUENCES = 256  # of a context: llama.cpp's own limit
CAPABILITIES = Capabilities(
    modalities=("text", "image", "audio"),
    structured=True,
    logprobs=True,
    prompt_logprobs=True,
    post_sampling=True,
    reasoning_budget=True,
    embeddings=True,
    rerank=True,
    lora=True,
    ignored=("beam_size",),
)

# field → its type and range: what the admin API may override for one load
LIVE_OVERRIDES: dict[str, Any] = {
    "n_ctx": _Count,
    "type_k": _KvType,
    "type_v": _KvType,
    "n_gpu_layers": GpuLayers,
    "n_threads": Annotated[int, Field(ge=1, le=1024)],
    "n_threads_batch": Annotated[int, Field(ge=1, le=1024)],
    "n_batch": _Count,
    "n_ubatch": _Count,
    "flash_attn": Literal["auto", "on", "off"],
    "speculation": Literal["auto", "off", "ngram", "draft", "mtp"],
    "draft_n_max": Annotated[int, Field(ge=1, le=64)],
}


class Lora(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="The adapter's GGUF file.")
    scale: float = Field(default=1.0, description="Strength; a request's scale is multiplied with it.")


def _with_path(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


OneLora = Annotated[
    Lora, BeforeValidator(_with_path), WithJsonSchema({"anyOf": [{"type": "string"}, Lora.model_json_schema()]})
]


class ControlVector(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="The GGUF file with a direction per layer.")
    scale: float = Field(default=1.0, description="Strength; a negative one turns the direction around.")


OneControlVector = Annotated[
    ControlVector,
    BeforeValidator(_with_path),
    WithJsonSchema({"anyOf": [{"type": "string"}, ControlVector.model_json_schema()]}),
]


class Options(BaseModel):
    # Built at its first use: processes that check a file or the library have none.
    model_config = ConfigDict(extra="forbid", populate_by_name=True, defer_build=True)

    path: str = Field(description="The GGUF file, its folder, or the first file of a split model.")
    n_gpu_layers: GpuLayers = Field(
        default="auto",
        validation_alias=AliasChoices("n_gpu_layers", "gguf_n_gpu_layers"),
        description="Layers on the GPU, the output layer included: a number, -1 for all, or auto for as many as fit "
        "into the GPU's free memory. Without a GPU, or with a library for CPUs, it has no effect.",
    )
    n_threads: int | None = Field(
        default=None,
        gt=0,
        description="CPU threads, at most one per logical core; unset means as many as pay, up to the physical cores.",
    )
    n_threads_batch: int | None = Field(
        default=None,
        gt=0,
        description="CPU threads for decodes of several tokens: prompts, several streams; unset means n_threads.",
    )
    n_batch: int = Field(default=2048, gt=0, description="Tokens per llama_decode call, at most.")
    n_ubatch: int = Field(
        default=512,
        gt=0,
        description="Tokens computed at a time, at most; beside streams fewer are, see max_gap_ms.",
    )
    max_gap_ms: int = Field(
        default=150,
        ge=0,
        description="Milliseconds between two tokens of a stream while prompts are read: they are read in slices that "
        "take about so long, by the measured steps; 0: no limit. A step of other keys' prompts is shorter.",
    )
    flash_attn: bool | Literal["auto", "on", "off"] | None = Field(
        default=None,
        validation_alias=AliasChoices("flash_attn", "gguf_flash_attn"),
        description="Flash attention; unset: on for CPUs, for GPUs if all devices support it.",
    )
    n_cpu_moe: int = Field(
        default=0,
        ge=-1,
        le=10_000,
        description="Layers, from the first, whose experts stay in RAM while the rest is on the GPU; -1 for all. A "
        "token uses few experts, so this costs less speed than fewer layers on the GPU.",
    )
    moe_cache_mb: int = Field(
        default=0,
        ge=0,
        le=1 << 24,
        description="MiB of GPU memory for experts of layers that n_cpu_moe keeps in RAM: those that are used often. "
        "It needs a llama.cpp library of build 11549 or later.",
    )
    tensor_overrides: dict[str, str] = Field(
        default_factory=dict,
        description="Where single tensors go: regular expressions for their names, with CPU or the name of a GPU, such "
        "as CUDA0. The first match decides.",
    )
    devices: list[str] | None = Field(
        default=None,
        min_length=1,
        description="GPUs of this model by llama.cpp's names, such as CUDA0; unset means all. `modelyard doctor` lists "
        "them.",
    )
    split_mode: Literal["none", "layer", "row", "tensor"] | None = Field(
        default=None,
        description="How several GPUs share the model: whole layers, rows of matrices, tensors, or none: only "
        "main_gpu; unset means layer.",
    )
    tensor_split: list[float] | None = Field(
        default=None, min_length=1, description="Each GPU's part, such as [3, 1]; unset means by their free memory."
    )
    main_gpu: int = Field(default=0, ge=0, description="The GPU for split_mode none, counted from 0 among the devices.")
    gpu_memory_mb: int | None = Field(
        default=None, gt=0, description="MiB of each GPU that n_gpu_layers = auto and fit may use; unset: what is free."
    )
    fit: bool = Field(
        default=False,
        description="For a model that is larger than the GPU's memory: choose n_cpu_moe, KV types, n_gpu_layers and, "
        "if RAM does not suffice either, smaller windows by estimate, and verify the choice when it is loaded.",
    )
    mlock: bool = Field(default=False, description="Keep the weights in RAM: the system may not swap them out.")
    direct_io: bool = Field(
        default=False, description="Read the file around the system's page cache; it excludes use_mmap and mlock."
    )
    numa: Literal["distribute", "isolate", "numactl"] | None = Field(
        default=None,
        description="For machines with several memory nodes: spread threads over all nodes, keep them on the node of "
        "the start, or as numactl says. It holds for the whole process, so with placement auto the model gets its own.",
    )
    kv_unified: bool = Field(
        default=False,
        description="Let the sequences of a cache share one pool of KV cells, of the same size: a prefix that several "
        "have is copied for nothing, but each token attends past the cells of all others. False, with cells of its "
        "own for each sequence, decodes faster.",
    )
    swa_full: bool = Field(
        default=False,
        description="Keep all KV of sliding-window layers: an edited conversation is then read again from the edit on. "
        "False takes much less memory for long windows, and such a conversation goes on from a checkpoint.",
    )
    checkpoints: int = Field(
        default=8,
        ge=0,
        description="For models that cannot rewind (recurrent, hybrid, sliding window): states kept per sequence, so "
        "that an edited conversation is not read from its start.",
    )
    checkpoint_mb: int = Field(default=512, ge=0, description="MiB that the checkpoints of one sequence may take.")
    parked_mb: int = Field(
        default=1024,
        ge=0,
        description="MiB of RAM per cache for the KV of evicted conversations: they come back without reading their "
        "prompt again. 0 turns this off.",
    )
    cache_reuse: int = Field(
        default=0,
        ge=0,
        description="When text was removed from the middle of a conversation, move the KV of unchanged text behind it "
        "instead of reading it again, in blocks of at least this many tokens, such as 256; 0 turns this off. The moved "
        "KV was computed behind the removed text, so answers may differ from those of a fresh prompt, seeds included. "
        "Only models that attend to everything or have swa_full, without images.",
    )
    share_across_caches: bool = Field(
        default=False,
        description="Let the caches of this model reuse each other's KV, if their types are the same. False: a prompt "
        "is compared with those of its own cache only.",
    )
    kv_store: bool | Literal["auto"] | str = Field(
        default="auto",
        description="Save the KV of every cache when the model is unloaded and restore it when it is loaded: true in "
        "the user's cache folder, or in the folder given; auto there, too, conversations of at least 256 tokens, "
        "unless $MODELYARD_KV_STORE is off. The files contain the conversations; only their owner can read them.",
    )
    kv_store_mb: int = Field(
        default=4096,
        gt=0,
        description="MiB that kv_store may take, of all models together; the oldest files are deleted first.",
    )
    use_mmap: bool = Field(
        default=False,
        description="Map the file into memory instead of reading it: large models load faster, but a CPU generates "
        "more slowly. A mapped file that is truncated kills the process, so with placement auto the model gets its "
        "own.",
    )
    overcommit: bool = Field(default=False, description="Load even if the estimate exceeds the free memory.")
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
    embeddings: bool | None = Field(
        default=None,
        description="Offer embeddings; unset means that embedding models do. true adds them to a model that generates.",
    )
    pooling: Literal["mean", "cls", "last"] | None = Field(
        default=None,
        description="How the vectors of an input's tokens become one; unset means as the file says, else mean.",
    )

    speculation: Literal["auto", "off", "ngram", "draft", "mtp"] = Field(
        default="auto",
        description="Speculative decoding with drafts from the job's own text (ngram), from a draft model (draft) or "
        "from the MTP layers that the model's file has (mtp). auto takes the draft model or, on a CPU, the MTP layers "
        "if there are such, else the text; auto and mtp draft only while that measures faster; answers are the same "
        "either way. "
        "Of recurrent and hybrid models those whose state llama.cpp can take back draft with ngram, draft and mtp, and "
        "keep a state per sequence for each token of a draft then.",
    )
    draft_model_path: str | None = Field(
        default=None, description="A small GGUF with the same vocabulary, for speculative decoding."
    )
    draft_n_max: int | None = Field(
        default=None, gt=0, le=64, description="Tokens of a draft, at most; unset: 8, of MTP layers 3."
    )
    draft_p_min: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="A draft ends before a token that is less likely than this; unset: 0.75, and 0 for layers that "
        "draft on a GPU, where steps of equal size are faster than small ones.",
    )

    mmproj: str | bool | None = Field(
        default=None,
        description="The projector for images and audio, a GGUF file; unset: the file beside the model whose name has "
        "mmproj in it; false: none. It needs libmtmd, which `modelyard setup --media` compiles.",
    )
    mmproj_gpu: bool | None = Field(
        default=None, description="Encode images and audio on the GPU; unset: if layers of the model are there."
    )
    image_min_tokens: int | None = Field(
        default=None, gt=0, description="Least tokens of an image, if the model scales images; unset: the file's."
    )
    image_max_tokens: int | None = Field(
        default=None, gt=0, description="Most tokens of an image, if the model scales images; unset: the file's."
    )
    media_cache_mb: int = Field(
        default=256, ge=0, description="MiB of RAM for encoded images and audio that may come again."
    )

    lora: dict[str, OneLora] = Field(
        default_factory=dict, description="LoRA adapters by the name that requests use: a path, or path and scale."
    )

    control_vectors: list[OneControlVector] = Field(
        default_factory=list,
        description="Control vectors that are added to the layers for all answers: GGUF files with direction.N, each a "
        "path, or path and scale.",
    )
    control_vector_layers: tuple[int, int] | None = Field(
        default=None, description="The first and the last layer that get them, counted from 1; unset means all."
    )

    @model_validator(mode="after")
    def _check_control_vector_layers(self) -> Options:
        layers = self.control_vector_layers
        if layers is not None and not 1 <= layers[0] <= layers[1]:
            raise ValueError(f"control_vector_layers must be a first and a last layer from 1 on, not {list(layers)}")
        return self

    @model_validator(mode="after")
    def _require_draft_model(self) -> Options:
        if self.speculation == "draft" and self.draft_model_path is None:
            raise ValueError("speculation = draft needs a draft_model_path")
        return self

    @model_validator(mode="after")
    def _check_loading(self) -> Options:
        if self.tensor_split is not None and (min(self.tensor_split) < 0 or not any(self.tensor_split)):
            raise ValueError(f"tensor_split must be the parts of the GPUs, such as [3, 1], not {self.tensor_split}")
        if self.direct_io and (self.use_mmap or self.mlock):
            raise ValueError("direct_io excludes use_mmap and mlock")
        for pattern in self.tensor_overrides:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"tensor_overrides: {pattern!r} is not a regular expression: {error}") from None
        return self

    @property
    def uses_draft_model(self) -> bool:
        return self.draft_model_path is not None and self.speculation in ("auto", "draft", "mtp")

    @property
    def rollback(self) -> int:
        """How many tokens of a draft recurrent and hybrid models must be able to take back. Each needs memory for a
        state per sequence, so speculation must be asked for."""
        return self.max_draft if self.speculation in ("ngram", "draft", "mtp") else 0

    @property
    def max_draft(self) -> int:
        return self.draft_n_max or (3 if self.speculation == "mtp" else 8)

    @property
    def scales_positions(self) -> bool:
        """Whether these options extend the trained length."""
        return self.rope_scaling not in (None, "none") or self.rope_freq_base is not None or bool(self.rope_freq_scale)

    def for_cache(self, cache: CacheInfo) -> Options:
        """With the cache's own settings applied."""
        own = {name: getattr(cache, name) for name in _CACHE_OPTIONS}
        return self.model_copy(update={name: value for name, value in own.items() if value is not None})


_CACHE_OPTIONS = ("n_batch", "n_ubatch", "n_threads", "flash_attn", "kv_unified")


class ContextLayout(Struct, frozen=True):
    """A llama_context and its caches. `info` is that of any of them, with the sequences of all."""

    caches: Mapping[str, CacheInfo]
    info: CacheInfo


def context_layouts(caches: Mapping[str, CacheInfo], options: Options) -> list[ContextLayout]:
    """Caches with equal settings share a context: their jobs are computed together."""
    groups: list[dict[str, CacheInfo]] = []
    for name, info in caches.items():
        group = next((group for group in groups if _share_context(group, info, options)), None)
        if group is None:
            groups.append(group := {})
        group[name] = info
    return [
        ContextLayout(group, structs.replace(next(iter(group.values())), parallel=_sequences(group)))
        for group in groups
    ]


def _share_context(group: Mapping[str, CacheInfo], info: CacheInfo, options: Options) -> bool:
    first = next(iter(group.values()))
    return _context_settings(first, options) == _context_settings(info, options) and (
        _sequences(group) + info.parallel <= MAX_SEQUENCES
    )


def _context_settings(info: CacheInfo, options: Options) -> tuple[Any, ...]:
    own = options.for_cache(info)
    types = info.type_k.lower(), info.type_v.lower()
    sizes = own.n_batch, own.n_ubatch, own.n_threads, own.kv_unified
    return info.window, *types, *sizes, flash_attention_mode(own, gpu=False)


def _sequences(group: Mapping[str, CacheInfo]) -> int:
    return sum(info.parallel for info in group.values())


def model_capabilities(purpose: ModelPurpose, options: Options) -> Capabilities:
    """What a model with this purpose can do: generate, or embed, or rank. Its projector adds what it sees and hears."""
    embeds = purpose.task == "embedding" if options.embeddings is None else options.embeddings
    can_embed = purpose.has_vectors and purpose.task in ("chat", "embedding")
    return structs.replace(
        CAPABILITIES,
        modalities=("text",),
        generates=purpose.task == "chat",
        embeddings=can_embed and embeds,
        embeddings_optional=can_embed and not embeds,
        rerank=purpose.task == "reranking",
    )


def kv_type_bytes(name: str) -> float:
    return KV_TYPES.get(name.lower(), KV_TYPES["f32"])[1]  # an unknown type is refused when the context is created


def flash_attention_mode(options: Options, *, gpu: bool) -> FlashAttentionMode:
    """The user's setting, else what measures better on such a device.

    On a CPU it is on. Against the plain path it reads prompts 1.1 times as fast (1.7 with AMX), decodes short contexts
    faster and those of 512 tokens as fast, and needs no memory for the scores of whole micro-batches. At 4,000 tokens
    the plain path decodes 1.5 times as fast without AMX (docs/performance.md). Exception:
    `library.is_flash_attention_slow`. On a GPU llama.cpp knows whether all devices of the model support it: `auto`.
    """
    if options.flash_attn is None:
        return "auto" if gpu else "on"
    if isinstance(options.flash_attn, str):
        return options.flash_attn
    return "on" if options.flash_attn else "off"
