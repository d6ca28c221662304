"""The fake engine's fields of a model definition."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from modelyard.engines.fake.script import ScriptRule, read_script

_SHIPPED_TOKENIZER = Path(__file__).parent / "tokenizer"
_DEMO_DELAY = 0.01  # seconds; about the speed of a good local model

# field → type with range: what the admin API may set for one load
LIVE_OVERRIDES: dict[str, Any] = {
    "n_ctx": Annotated[int, Field(ge=1, le=1 << 24)],
    "token_delay": Annotated[float, Field(ge=0, le=60)],
    "echo": bool,
    "embedding_size": Annotated[int, Field(ge=1, le=65536)],
}


class FakeOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["text", "chat"] = Field(default="text", description="Kind of engine: tokens or conversations.")
    script: tuple[ScriptRule, ...] = Field(
        default=(), description="Rules, inline or as the path of a TOML file; none: a demo."
    )
    echo: bool = Field(default=False, description="If no rule matches, answer with the user's message.")
    token_delay: float | None = Field(
        default=None, ge=0, description="Seconds between tokens; default: 0, for the demo 0.01."
    )
    prefill_rate: float | None = Field(
        default=None, gt=0, description="Prompt tokens per second during prefill; default: no prefill time."
    )
    format: str = Field(
        default="hermes",
        description="Output format of scripted reasoning and calls: hermes, qwen3_coder or harmony.",
    )
    tokenizer_path: Path | None = Field(
        default=None, description="A tokenizer.json or its folder, instead of the shipped one."
    )
    embedding_size: int = Field(default=64, ge=1, le=65536, description="Length of embedding vectors.")

    @field_validator("script", mode="before")
    @classmethod
    def _read_script_file(cls, script: Any) -> Any:
        return read_script(Path(script)) if isinstance(script, str | Path) else script

    @property
    def delay(self) -> float:
        if self.token_delay is not None:
            return self.token_delay
        return 0.0 if self.script or self.echo else _DEMO_DELAY


def tokenizer_path(options: FakeOptions) -> Path:
    return options.tokenizer_path or _SHIPPED_TOKENIZER


def chat_template(options: FakeOptions) -> str | None:
    """None: the built-in generic template. The fake engine reads ChatML and harmony prompts."""
    del options
    return None
