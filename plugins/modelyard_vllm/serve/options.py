"""The vllm serve engine's fields of a model definition: vLLM's, and those of the process and its HTTP server."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from modelyard_vllm.options import RESERVED_ARGUMENTS, KernelName, VllmOptions

_RESERVED_FLAGS = {f"--{name.replace('_', '-')}": field for name, field in RESERVED_ARGUMENTS.items()} | {
    "--host": "vllm_serve_host",
    "--port": "vllm_serve_port",
    "--uds": "nothing: the gateway creates a socket if no host and port are set",
    "--api-key": "vllm_serve_api_key",
    "--enable-sleep-mode": "vllm_serve_sleep_s",
}


TextList = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class VllmServeOptions(VllmOptions):
    chat_template: str | None = Field(default=None, description="The Jinja chat template, as text or as a file's path.")
    enable_thinking: bool | None = Field(default=None, description="Thinking if the request does not say.")
    vllm_serve_binary: str | None = Field(
        default=None, description="The program. Unset: vllm on the PATH, else the one that make vllm-env installed."
    )
    vllm_serve_host: str | None = Field(
        default=None,
        description="Address to listen on. Unset: a unix socket in a private folder, or loopback if a port is set.",
    )
    vllm_serve_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port to listen on; 0, or unset with a host: a free one."
    )
    vllm_serve_library_path: TextList = Field(
        default_factory=list, description="Folders to put before LD_LIBRARY_PATH for the program."
    )
    vllm_serve_env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables for the program, such as CUDA_VISIBLE_DEVICES."
    )
    vllm_serve_api_key: str | None = Field(
        default=None, min_length=1, description="The program's API key; unset: a new one at each start."
    )
    vllm_serve_start_timeout_s: float = Field(default=600.0, gt=0, description="Maximum time to load in seconds.")
    vllm_serve_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Maximum seconds without data during an answer; vLLM sends nothing during prefill.",
    )
    vllm_serve_tool_parser: KernelName | None = Field(
        default=None,
        description="vLLM's parser for tool calls. Unset: chosen by the markers in the chat template; none: no tools.",
    )
    vllm_serve_reasoning_parser: KernelName | None = Field(
        default=None,
        description="vLLM's parser for reasoning. Unset: chosen by the markers in the chat template; "
        "none: reasoning stays in the text.",
    )
    vllm_serve_trial: bool = Field(
        default=True,
        description="Whether loading requests one token: some builds report that they are ready and die at the "
        "first request.",
    )
    vllm_serve_sleep_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds that an unloaded server sleeps before it is stopped. A sleeping server has its weights in "
        "RAM, not on the GPU; a load wakes it up. 0: it is stopped at once.",
    )
    vllm_serve_extra_args: TextList = Field(
        default_factory=list, description="Further arguments, appended to the command line verbatim."
    )

    @field_validator("vllm_serve_extra_args")
    @classmethod
    def _check_reserved_flags(cls, extra: list[str]) -> list[str]:
        for argument in extra:
            if field := _RESERVED_FLAGS.get(flag_name(argument)):
                raise ValueError(f"{flag_name(argument)} is set by {field}; remove it here")
        return extra

    @model_validator(mode="after")
    def _check_sleep(self) -> Self:
        """vLLM enables sleep only together with other development endpoints, which need no key."""
        if self.vllm_serve_sleep_s and not self.is_private:
            raise ValueError("vllm_serve_sleep_s needs the private socket: remove vllm_serve_host and vllm_serve_port")
        return self

    @property
    def is_private(self) -> bool:
        return self.vllm_serve_host is None and self.vllm_serve_port is None


def flag_name(argument: str) -> str:
    """The name of a flag: vLLM accepts `_` and `-`, and a value after an equals sign."""
    return argument.partition("=")[0].replace("_", "-")
