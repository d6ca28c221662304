"""Settings of the front door: where it listens, who may enter, and how much it takes in."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class HttpSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address to listen on. Anything but a loopback address needs at least one API key.",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    ollama_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="A second port to listen on. With 11434, Ollama's, its clients find this server by themselves.",
    )
    ssl_certfile: Path | None = Field(
        default=None, description="PEM file of the TLS certificate chain. Set together with ssl_keyfile to serve HTTPS."
    )
    ssl_keyfile: Path | None = Field(default=None, description="PEM file of the certificate's private key.")
    cors_enabled: bool = Field(
        default=False, description="Whether web pages from elsewhere may call this server from a browser."
    )
    cors_origins: list[str] = Field(
        default_factory=list,
        description="Origins that CORS admits, such as https://chat.example; empty with cors_enabled means all.",
    )
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="More Host names to accept on a loopback address (the check keeps foreign web pages out).",
    )
    max_body_bytes: int = Field(
        default=32 * 1024**2, gt=0, description="Largest request body; a larger one is answered 413."
    )
    max_memory_bytes: int | None = Field(
        default=None,
        ge=64 * 1024**2,
        description="Memory that all requests which wait or run may take, by an estimate from their sizes; one key may "
        "take half of it. Unset: a quarter of the machine's, or of its container's.",
    )
    max_json_depth: int = Field(default=64, gt=0, le=512, description="Deepest nesting of a JSON body.")
    max_header_bytes: int = Field(
        default=64 * 1024, ge=1024, description="Largest size of all request headers together."
    )
    keepalive_s: float = Field(
        default=5.0,
        gt=0,
        le=10,
        description="Longest silence on a stream before a ping, in seconds; clients give up after 10.",
    )
    stall_s: float = Field(
        default=120.0,
        gt=0,
        description="A client that reads nothing of its reply for so many seconds is disconnected, so that it holds "
        "no slot and no memory.",
    )
    drain_s: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="After SIGTERM running requests have so many seconds to finish, while new ones get 503; a second "
        "signal ends them at once.",
    )
    workers: int = Field(default=1, ge=1, le=256, description="Gateway processes on the one port.")
    responses_dialect: Literal["auto", "openai", "pool"] = Field(
        default="auto",
        description="The shape of POST /v1/responses without the header x-modelyard-dialect: by the fields of the "
        "body (auto), always OpenAI's, or llm-pool's for clients that send neither OpenAI's fields nor the "
        "headers of OpenAI's SDKs. Unset with engine.models: pool.",
    )
    chat_dialect: Literal["openai", "infer_server"] = Field(
        default="openai",
        description="The defaults of Chat Completions: OpenAI's, or Infer Server's for clients that do not send the "
        "headers of OpenAI's SDKs: stream is true, and a stream that fails has the finish reason error.",
    )
    docs: bool = Field(default=True, description="Serve the interactive API documentation at /docs.")
    workbench: bool = Field(
        default=True,
        description="Serve the workbench at /workbench. Its pages open without a key; what they show needs a role.",
    )
    edit_config: bool = Field(
        default=True,
        description="Whether the owner may change models, caches and routes in the configuration files over HTTP, "
        "and so which programs and files of this machine the server uses.",
    )

    @model_validator(mode="after")
    def _tls_is_a_pair(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            given, absent = ("ssl_certfile", "ssl_keyfile") if self.ssl_certfile else ("ssl_keyfile", "ssl_certfile")
            raise ValueError(f"{given} is set but {absent} is not; TLS needs both")
        return self
