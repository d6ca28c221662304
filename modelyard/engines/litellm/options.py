"""The LiteLLM engine's fields of a model definition."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class LiteLlmOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    litellm_model: str = Field(
        min_length=1, description="LiteLLM's name of the model: provider/model, such as bedrock/…."
    )
    litellm_api_key_env: str | None = Field(
        default=None, description="Environment variable that holds the key; unset: LiteLLM's own lookup."
    )
    litellm_api_base: str | None = Field(default=None, description="Address of the provider, if not the default.")
    litellm_timeout_s: float = Field(default=120.0, gt=0, description="Maximum time that LiteLLM waits, in seconds.")
    litellm_max_retries: int = Field(
        default=0, ge=0, le=10, description="Retries of a request that failed before the first byte of its answer."
    )
    litellm_params: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of litellm.acompletion, such as aws_region_name."
    )
