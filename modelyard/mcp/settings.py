"""Settings of MCP servers, and of the tool calls that the gateway makes for a model."""

from __future__ import annotations

import re
from typing import Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_HOST = re.compile(r"[\w.*?\[\]:!-]+")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class McpServerSettings(BaseModel):
    """One server: a program that is started here (`command`) or a URL."""

    model_config = ConfigDict(extra="forbid")

    command: str | None = Field(
        default=None, min_length=1, description="Program that is started here; it speaks MCP on its standard streams."
    )
    args: list[str] = Field(default_factory=list, description="Arguments of command.")
    env: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables of command. Of the gateway's own it gets only HOME, PATH and the like.",
    )
    env_from: list[str] = Field(
        default_factory=list, description="Environment variables of the gateway that command gets too, such as tokens."
    )
    cwd: str | None = Field(default=None, description="Working directory of command.")
    url: str | None = Field(default=None, description="URL of a server that speaks streamable HTTP.")
    headers: dict[str, str] = Field(default_factory=dict, description="HTTP headers for url.")
    token_env: str | None = Field(
        default=None, description="Environment variable with the token that url gets as authorization: Bearer."
    )
    tools: list[str] = Field(
        default_factory=lambda: ["*"], description="Globs of the tools that are offered; the others do not exist here."
    )
    by_request: bool = Field(
        default=True, description="Let requests name this server; false: only the routes that list it use it."
    )
    timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds that one call may take; unset means mcp.timeout_s."
    )

    @model_validator(mode="after")
    def _one_transport(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("a server needs either command or url")
        own = {"command": ("args", "env", "env_from", "cwd"), "url": ("headers", "token_env")}
        used, unused = ("command", "url") if self.command is not None else ("url", "command")
        for name in own[unused]:
            if name in self.model_fields_set:
                raise ValueError(f"{name} belongs to {unused}, and this server has {used}")
        if self.url is not None:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{self.url!r} is not an http(s) URL")
        return self


class McpSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    servers: dict[str, McpServerSettings] = Field(
        default_factory=dict, description="Servers by the names that requests and routes use; none: MCP is off."
    )
    timeout_s: float = Field(default=60.0, gt=0, description="Seconds that one call of a tool may take.")
    connect_timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds that a server may take to start and to list its tools."
    )
    max_rounds: int = Field(
        default=10, ge=1, description="How often a model may call tools in one request before it must answer."
    )
    max_calls: int = Field(default=32, ge=1, description="Calls of tools in one request.")
    max_output_chars: int = Field(
        default=50_000, ge=100, description="Characters of one result that the model reads; the rest is cut off."
    )
    allow_urls: list[str] = Field(
        default_factory=list,
        description='Hosts (globs such as "*.example.com") of servers that requests may name by their URL; '
        "an empty list allows none.",
    )
    allow_private: bool = Field(
        default=False, description="Whether hosts of allow_urls may resolve to private or loopback addresses."
    )

    @property
    def is_on(self) -> bool:
        return bool(self.servers or self.allow_urls)

    @field_validator("servers")
    @classmethod
    def _names(cls, servers: dict[str, McpServerSettings]) -> dict[str, McpServerSettings]:
        for name in servers:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r}: a name has 1 to 64 letters, digits, dashes and underscores")
        return servers

    @field_validator("allow_urls")
    @classmethod
    def _hosts(cls, values: list[str]) -> list[str]:
        for value in values:
            if not _HOST.fullmatch(value):
                raise ValueError(f"{value!r} is not a host glob such as *.example.com")
        return values
