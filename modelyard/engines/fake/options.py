"""The fake engine's own fields of a model definition."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from modelyard.engines.fake.script import ScriptRule, read_script

_SHIPPED = Path(__file__).parent / "tokenizer"
_DEMO_DELAY = 0.01  # about as fast as a good local model


# field → its type with its range: what one load may set for itself, through the admin API
LIVE_OVERRIDES: dict[str, Any] = {
    "n_ctx": Annotated[int, Field(ge=1, le=1 << 24)],
    "token_delay": Annotated[float, Field(ge=0, le=60)],
    "echo": bool,
    "embedding_size": Annotated[int, Field(ge=1, le=65536)],
}


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["text", "chat"] = Field(default="text", description="Which of the two kinds of engine to play.")
    script: tuple[ScriptRule, ...] = Field(
        default=(), description="Rules, inline or as the path of a TOML file; none: a demo."
    )
    echo: bool = Field(default=False, description="Where no rule fits, answer with the user's own words.")
    token_delay: float | None = Field(
        default=None, ge=0, description="Seconds between tokens; default: 0, for the demo 0.01."
    )
    prefill_rate: float | None = Field(default=None, gt=0, description="Prompt tokens read a second; default: at once.")
    format: str = Field(
        default="hermes",
        description="How scripted reasoning and calls are spelled: qwen3_coder, harmony, or as hermes does.",
    )
    tokenizer_path: Path | None = Field(
        default=None, description="A tokenizer.json or its folder instead of the shipped one."
    )
    embedding_size: int = Field(default=64, ge=1, le=65536, description="Length of embedding vectors.")

    @field_validator("script", mode="before")
    @classmethod
    def _read(cls, script: Any) -> Any:
        return read_script(Path(script)) if isinstance(script, str | Path) else script

    @property
    def delay(self) -> float:
        if self.token_delay is not None:
            return self.token_delay
        return 0.0 if self.script or self.echo else _DEMO_DELAY


def tokenizer_path(options: Options) -> Path:
    return options.tokenizer_path or _SHIPPED


def chat_template(options: Options) -> str | None:
    """None: the built-in generic template. The fake reads ChatML and harmony turns and brings no template itself."""
    del options
    return None
