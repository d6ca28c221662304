"""The fields of a model that a `vllm serve` of ours runs: vLLM's own, and those of the process and its HTTP side."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from modelyard.engines.vllm.settings import OURS, Name, VllmSettings

_FLAGS = {f"--{name.replace('_', '-')}": field for name, field in OURS.items()} | {
    "--host": "vllm_serve_host",
    "--port": "vllm_serve_port",
    "--uds": "nothing: the gateway makes a socket of its own where no host and port are set",
    "--api-key": "vllm_serve_api_key",
    "--enable-sleep-mode": "vllm_serve_sleep_s",
}


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(_texts)]


class Options(VllmSettings):
    chat_template: str | None = Field(default=None, description="The Jinja chat template, as text or as a file's path.")
    enable_thinking: bool | None = Field(default=None, description="Thinking where the client asks for none.")
    vllm_serve_binary: str | None = Field(
        default=None, description="The program. Unset: vllm on the PATH, else the one that make vllm-env has installed."
    )
    vllm_serve_host: str | None = Field(
        default=None,
        description="Address to listen on. Unset: a unix socket in a private folder, or loopback with a port.",
    )
    vllm_serve_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port to listen on; 0, and unset with a host: a free one."
    )
    vllm_serve_library_path: Texts = Field(
        default_factory=list, description="Folders put before LD_LIBRARY_PATH for the program."
    )
    vllm_serve_env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables for the program, such as CUDA_VISIBLE_DEVICES."
    )
    vllm_serve_api_key: str | None = Field(
        default=None, min_length=1, description="The program's key; unset: one made anew at each start."
    )
    vllm_serve_start_timeout_s: float = Field(default=600.0, gt=0, description="Longest time to load, in seconds.")
    vllm_serve_timeout_s: float = Field(
        default=600.0, gt=0, description="Longest silence in seconds; reading a prompt is silence to this program."
    )
    vllm_serve_tool_parser: Name | None = Field(
        default=None,
        description="How the model writes tool calls, by vLLM's name for it. Unset: by the marks of its chat template; "
        "none: tools are not offered.",
    )
    vllm_serve_reasoning_parser: Name | None = Field(
        default=None,
        description="How the model writes reasoning, by vLLM's name for it. Unset: by the marks of its chat template; "
        "none: it stays in the text.",
    )
    vllm_serve_trial: bool = Field(
        default=True,
        description="Whether one token is asked for before the model counts as loaded: some builds say that they are "
        "ready and die at the first request.",
    )
    vllm_serve_sleep_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds that an unloaded server sleeps, its GPU memory given back and its weights in RAM, before "
        "it is ended: a load in that time only wakes it. 0: it is ended at once.",
    )
    vllm_serve_extra_args: Texts = Field(
        default_factory=list, description="Further arguments, put at the end of the command line as they are."
    )

    @field_validator("vllm_serve_extra_args")
    @classmethod
    def _not_ours(cls, extra: list[str]) -> list[str]:
        for argument in extra:
            if field := _FLAGS.get(flag_of(argument)):
                raise ValueError(f"{flag_of(argument)} is set by {field}; leave it out here")
        return extra

    @model_validator(mode="after")
    def _sleeps_in_private(self) -> Self:
        """vLLM offers sleep only together with other development endpoints, which ask for no key."""
        if self.vllm_serve_sleep_s and not self.is_private:
            raise ValueError("vllm_serve_sleep_s needs the private socket: leave vllm_serve_host and _port out")
        return self

    @property
    def is_private(self) -> bool:
        return self.vllm_serve_host is None and self.vllm_serve_port is None


def flag_of(argument: str) -> str:
    """vLLM takes both spellings of a flag, and a value behind an equals sign."""
    return argument.partition("=")[0].replace("_", "-")
