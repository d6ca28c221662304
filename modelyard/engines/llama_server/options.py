"""The llama-server engine's fields of a model definition, and those that one load may override."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

# flags that other fields set: llama_server_extra_args must not contradict them
_RESERVED_FLAGS = {
    **dict.fromkeys(("-m", "--model"), "path"),
    **dict.fromkeys(("-c", "--ctx-size"), "llama_server_n_ctx"),
    **dict.fromkeys(("-np", "--parallel"), "parallel"),
    "--host": "llama_server_host",
    "--port": "llama_server_port",
    **dict.fromkeys(("--api-key", "--api-key-file"), "nothing: the gateway creates a key"),
}
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
# our short names → llama-server's
SPEC_ALIASES = {"draft": "draft-simple", "mtp": "draft-mtp", "eagle3": "draft-eagle3"}
SPEC_TYPES = (
    "none",
    *("draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark"),
    *("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"),
)


def _int_to_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _switch(value: Any) -> Any:
    """YAML reads on and off as booleans; some configurations say "none" for off."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "off" if value == "none" else value


def _check_spec_types(value: str) -> str:
    for name in value.split(","):
        if name not in SPEC_TYPES and name not in SPEC_ALIASES:
            known = ", ".join((*SPEC_ALIASES, *SPEC_TYPES))
            raise ValueError(
                f"{name!r} is not a kind of speculative decoding; known: {known}. For one that only a newer program "
                "has, put --spec-type into llama_server_extra_args"
            )
    return value


TextList = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
Layers = Annotated[str, BeforeValidator(_int_to_text), Field(pattern=r"^(-1|\d+|auto|all)$")]
Switch = Annotated[Literal["on", "off", "auto"], BeforeValidator(_switch)]

Window = Annotated[int, Field(ge=1, le=1 << 24)]
ImageTokens = Annotated[int, Field(ge=1, le=1 << 16)]
SpecType = Annotated[str, AfterValidator(_check_spec_types)]
DraftTokens = Annotated[int, Field(ge=1, le=6)]
Probability = Annotated[float, Field(ge=0, le=1)]

# field → type with range: what the admin API may set for one load
LIVE_OVERRIDES: dict[str, Any] = {
    "llama_server_n_ctx": Window,
    "llama_server_image_max_tokens": ImageTokens,
    "llama_server_spec_type": SpecType,
    "llama_server_spec_draft_n_max": DraftTokens,
    "llama_server_spec_draft_p_min": Probability,
}


class LlamaServerOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="The GGUF file, its folder, or the first file of a split model.")
    chat_template: str | None = Field(default=None, description="The Jinja chat template, as text or as a file's path.")
    enable_thinking: bool | None = Field(default=None, description="Thinking if the request does not say.")
    spm_infill: bool = Field(default=False, description="Fill-in-the-middle prompts begin with the suffix.")
    llama_server_binary: str | None = Field(
        default=None,
        description="The program. Unset: llama-server on the PATH, else the one that setup/llama_server.py downloaded.",
    )
    llama_server_host: str | None = Field(
        default=None,
        description="Address to listen on. Unset: a unix socket in a private folder, or loopback if a port is set.",
    )
    llama_server_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port to listen on; 0, or unset with a host: a free one."
    )
    llama_server_library_path: TextList = Field(
        default_factory=list, description="Folders to put before LD_LIBRARY_PATH for the program."
    )
    llama_server_env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables for the program, such as CUDA_VISIBLE_DEVICES."
    )
    llama_server_n_gpu_layers: Layers | None = Field(
        default=None,
        description="Layers on the GPU: a number, -1 or all, or auto; unset: llama-server's default.",
    )
    llama_server_n_threads: int | None = Field(
        default=None, gt=0, description="CPU threads, at most one per logical core; unset: llama-server's default."
    )
    llama_server_n_threads_batch: int | None = Field(
        default=None, gt=0, description="CPU threads during prefill; unset: the same as for decoding."
    )
    llama_server_flash_attn: Switch | None = Field(default=None, description="Flash attention: on, off or auto.")
    llama_server_mmproj_path: str | None = Field(default=None, description="The multimodal projector for images.")
    llama_server_image_max_tokens: ImageTokens | None = Field(default=None, description="Maximum tokens of one image.")
    llama_server_draft_model_path: str | None = Field(
        default=None, description="A small model with the same vocabulary, for speculative decoding."
    )
    llama_server_spec_type: SpecType | None = Field(
        default=None,
        description="Kinds of speculative decoding by llama-server's names; draft and mtp are aliases.",
    )
    llama_server_spec_draft_n_max: int | None = Field(
        default=None, ge=1, description="Maximum number of drafted tokens."
    )
    llama_server_spec_draft_p_min: Probability | None = Field(
        default=None, description="Minimum probability of a drafted token."
    )
    llama_server_spec_draft_ngl: Layers | None = Field(default=None, description="The draft model's layers on the GPU.")
    llama_server_reasoning: Switch | None = Field(
        default=None, description="llama-server's reasoning switch: on, off (or none) or auto."
    )
    llama_server_start_timeout_s: float = Field(default=600.0, gt=0, description="Maximum time to load in seconds.")
    llama_server_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Maximum seconds without data during an answer; the prefill reports progress and does not count.",
    )
    llama_server_extra_args: TextList = Field(
        default_factory=list, description="Further arguments, appended to the command line verbatim."
    )

    @field_validator("llama_server_extra_args")
    @classmethod
    def _check_reserved_flags(cls, extra: list[str]) -> list[str]:
        for argument in extra:
            if field := _RESERVED_FLAGS.get(argument.partition("=")[0]):
                raise ValueError(f"{argument.partition('=')[0]} is set by {field}; remove it here")
        return extra
