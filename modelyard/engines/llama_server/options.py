"""The fields of a model that a native llama-server runs, and those of them that may be set for one load."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

# What other fields set: a second word for it would make the settings lie.
_OURS = {
    **dict.fromkeys(("-m", "--model"), "path"),
    **dict.fromkeys(("-c", "--ctx-size"), "llama_server_n_ctx"),
    **dict.fromkeys(("-np", "--parallel"), "parallel"),
    "--host": "llama_server_host",
    "--port": "llama_server_port",
    **dict.fromkeys(("--api-key", "--api-key-file"), "nothing: the gateway makes a key of its own"),
}
_SPEC_TYPES = r"^[a-z0-9-]+(,[a-z0-9-]+)*$"


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _switch(value: Any) -> Any:
    """A bare on or off is a boolean in some files; seen in the wild as «none», too."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "off" if value == "none" else value


Texts = Annotated[list[str], BeforeValidator(_texts)]
Layers = Annotated[str, BeforeValidator(_text), Field(pattern=r"^(-1|\d+|auto|all)$")]
Switch = Annotated[Literal["on", "off", "auto"], BeforeValidator(_switch)]

Window = Annotated[int, Field(ge=1, le=1 << 24)]
ImageTokens = Annotated[int, Field(ge=1, le=1 << 16)]
SpecType = Annotated[str, Field(pattern=_SPEC_TYPES)]
DraftTokens = Annotated[int, Field(ge=1, le=6)]
Probability = Annotated[float, Field(ge=0, le=1)]

# field → its type with its range: what one load may set for itself, through the admin API
LIVE_OVERRIDES: dict[str, Any] = {
    "llama_server_n_ctx": Window,
    "llama_server_image_max_tokens": ImageTokens,
    "llama_server_spec_type": SpecType,
    "llama_server_spec_draft_n_max": DraftTokens,
    "llama_server_spec_draft_p_min": Probability,
}


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="The GGUF file, its folder, or the first file of a split model.")
    chat_template: str | None = Field(default=None, description="The Jinja chat template, as text or as a file's path.")
    enable_thinking: bool | None = Field(default=None, description="Thinking where the client asks for none.")
    llama_server_binary: str | None = Field(
        default=None,
        description="The program. Unset: llama-server on the PATH, else the one that setup/llama_server.py fetched.",
    )
    llama_server_host: str | None = Field(
        default=None,
        description="Address to listen on. Unset: a unix socket in a private folder, or loopback with a port.",
    )
    llama_server_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port to listen on; 0, and unset with a host: a free one."
    )
    llama_server_library_path: Texts = Field(
        default_factory=list, description="Folders put before LD_LIBRARY_PATH for the program."
    )
    llama_server_env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables for the program, such as CUDA_VISIBLE_DEVICES."
    )
    llama_server_n_gpu_layers: Layers | None = Field(
        default=None,
        description="Layers on the GPU: a number, -1 or all for all of them, auto; unset: its own default.",
    )
    llama_server_n_threads: int | None = Field(default=None, gt=0, description="CPU threads; unset: its own default.")
    llama_server_n_threads_batch: int | None = Field(
        default=None, gt=0, description="CPU threads while prompts are read; unset: as many as for the rest."
    )
    llama_server_flash_attn: Switch | None = Field(default=None, description="Flash attention: on, off or auto.")
    llama_server_mmproj_path: str | None = Field(
        default=None, description="The multimodal projector, which lets the model see images."
    )
    llama_server_image_max_tokens: ImageTokens | None = Field(
        default=None, description="Most tokens that one image may take of the window."
    )
    llama_server_draft_model_path: str | None = Field(
        default=None, description="A small model with the same vocabulary, for speculative decoding."
    )
    llama_server_spec_type: SpecType | None = Field(
        default=None,
        description="Kinds of speculative decoding, as llama-server calls them; draft and mtp are understood, too.",
    )
    llama_server_spec_draft_n_max: int | None = Field(default=None, ge=1, description="Most tokens drafted at a time.")
    llama_server_spec_draft_p_min: Probability | None = Field(
        default=None, description="Drafting stops at a token less likely than this."
    )
    llama_server_spec_draft_ngl: Layers | None = Field(default=None, description="The draft model's layers on the GPU.")
    llama_server_reasoning: Switch | None = Field(
        default=None, description="Reasoning as llama-server's own switch: on, off (or none) or auto."
    )
    llama_server_start_timeout_s: float = Field(default=600.0, gt=0, description="Longest time to load, in seconds.")
    llama_server_timeout_s: float = Field(
        default=600.0, gt=0, description="Longest silence during an answer in seconds; reading a prompt is no silence."
    )
    llama_server_extra_args: Texts = Field(
        default_factory=list, description="Further arguments, put at the end of the command line as they are."
    )

    @field_validator("llama_server_extra_args")
    @classmethod
    def _not_ours(cls, extra: list[str]) -> list[str]:
        for argument in extra:
            if field := _OURS.get(argument.partition("=")[0]):
                raise ValueError(f"{argument.partition('=')[0]} is set by {field}; leave it out here")
        return extra
