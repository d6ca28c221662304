"""The remote engine's fields of a model definition."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

ApiKind = Literal["chat_completions", "responses", "anthropic_messages"]


class OpenAiRemoteOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    remote_api_kind: ApiKind = Field(default="chat_completions", description="The API of the upstream.")
    remote_base_url: str = Field(
        description="Address of the upstream, such as https://api.example.com/v1; its paths are appended."
    )
    remote_model: str = Field(min_length=1, description="The upstream's name of the model.")
    remote_api_key_env: str | None = Field(
        default=None, description="Environment variable that holds the upstream's key; unset: no key is sent."
    )
    remote_headers: dict[str, str] = Field(default_factory=dict, description="Headers added to every request.")
    remote_timeout_s: float = Field(
        default=120.0, gt=0, description="Maximum seconds without data, before and during an answer."
    )
    remote_max_retries: int = Field(
        default=0,
        ge=0,
        le=10,
        description="Retries of a request that failed before the first byte of its answer.",
    )
    remote_health_check: Literal["config_only", "models"] = Field(
        default="config_only",
        description="What loading checks: the settings and the key, or also the upstream's list of models.",
    )
    remote_thinking: Literal["default", "enabled", "disabled"] = Field(
        default="default",
        description="Thinking if the request does not say; on Chat sent as the provider's thinking field.",
    )
    remote_max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum tokens of an answer if the request does not say; an Anthropic upstream gets 8192.",
    )
    remote_extensions: bool = Field(
        default=False,
        description="Whether the upstream accepts extension fields (top_k, grammar …), as another Modelyard, "
        "llama-server or vLLM does; else it gets only the fields of the official API.",
    )

    @field_validator("remote_base_url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be an http:// or https:// address, such as https://api.example.com/v1")
        return url.rstrip("/")
