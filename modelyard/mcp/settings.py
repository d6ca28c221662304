"""Settings of MCP servers, and of the tool calls that the gateway makes for a model."""

from __future__ import annotations

import re
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_HOST = re.compile(r"[\w.*?\[\]:!-]+")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class OAuthSettings(BaseModel):
    """How the gateway gets a token for `url`. The server says which authorization server issues them."""

    model_config = ConfigDict(extra="forbid")

    grant: Literal["authorization_code", "client_credentials"] = Field(
        default="authorization_code",
        description="authorization_code: a person logs in once, with modelyard mcp login NAME. "
        "client_credentials: the gateway itself, with client_id and client_secret_env.",
    )
    client_id: str | None = Field(
        default=None,
        min_length=1,
        description="Client that was registered before, or the https URL of its metadata document; "
        "unset: the gateway registers itself.",
    )
    client_secret_env: str | None = Field(default=None, description="Environment variable with the client's secret.")
    client_auth: Literal["client_secret_basic", "client_secret_post"] = Field(
        default="client_secret_basic", description="How the secret is sent to the token endpoint."
    )
    issuer: str | None = Field(
        default=None, description="Authorization server that the client belongs to; no other one gets its secret."
    )
    scope: str | None = Field(default=None, description="Scopes, separated by spaces; the server may ask for others.")
    redirect_port: int = Field(
        default=8976, ge=1, le=65535, description="Port of this machine on which a login waits for the browser."
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.grant == "client_credentials" and not (self.client_id and self.client_secret_env and self.issuer):
            raise ValueError("client_credentials needs client_id, client_secret_env and issuer")
        return self


class McpServerSettings(BaseModel):
    """One server: a program that is started here (`command`), a URL, or one that is part of the gateway (`builtin`)."""

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
    oauth: OAuthSettings | None = Field(default=None, description="Tokens by OAuth 2.1, in place of token_env.")
    elicitation: Literal["decline", "defaults"] = Field(
        default="decline",
        description="What a tool gets that asks the user for input: nothing, or the default values of its form. "
        "Either way the model reads what it asked.",
    )
    resources: bool = Field(default=False, description="Offer the model tools that list and read the resources.")
    prompts: bool = Field(default=False, description="Offer the model tools that list and read the prompts.")
    builtin: str | None = Field(
        default=None, description="Server that runs in the gateway: fetch, search, or one of another package."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Settings of builtin.")
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
        own = {
            "command": ("args", "env", "env_from", "cwd"),
            "url": ("headers", "token_env", "oauth"),
            "builtin": ("options",),
        }
        used = [name for name in own if getattr(self, name) is not None]
        if len(used) != 1:
            raise ValueError("a server needs either command, url or builtin")
        for owner, names in own.items():
            for name in names if owner != used[0] else ():
                if name in self.model_fields_set:
                    raise ValueError(f"{name} belongs to {owner}, and this server has {used[0]}")
        if self.oauth is not None and self.token_env is not None:
            raise ValueError("a server has either oauth or token_env")
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
