"""Tokens for an MCP server by OAuth 2.1: the official package does the protocol, this module keeps what it gets.

A person logs in with `modelyard mcp login NAME`; the gateway then uses and renews the tokens, which are in a file that
only its user can read. A gateway that finds none says which command to run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from modelyard.core.errors import InvalidRequest
from modelyard.library.cache_dir import data_dir
from modelyard.mcp.servers import Login
from modelyard.mcp.settings import OAuthSettings

if TYPE_CHECKING:
    import httpx2
    from mcp.shared.auth import OAuthClientInformationFull, OAuthToken

REDIRECT = "http://127.0.0.1:{port}/callback"


class LoginNeeded(InvalidRequest):
    default_code = "mcp_login_needed"


def oauth(name: str, url: str, settings: OAuthSettings, env: Mapping[str, str], login: Login | None) -> httpx2.Auth:
    from mcp.client.auth import OAuthClientProvider
    from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
    from mcp.shared.auth import OAuthClientMetadata

    secret = env.get(settings.client_secret_env or "")
    if settings.client_secret_env and not secret:
        raise InvalidRequest(f"the MCP server {name!r}: the environment has no {settings.client_secret_env}")
    storage = TokenFile(name, url, settings, secret, data_dir(env) / "mcp", is_needed=login is None)
    if settings.grant == "client_credentials":
        return ClientCredentialsOAuthProvider(
            url, storage, settings.client_id or "", secret or "", settings.client_auth, settings.scope, settings.issuer
        )
    metadata = OAuthClientMetadata.model_validate(_metadata(settings))
    document = settings.client_id if (settings.client_id or "").startswith("https://") else None
    show, wait = (login.show, login.wait) if login is not None else (storage.ask_for_login, storage.ask_for_login)
    return OAuthClientProvider(url, metadata, storage, show, wait, document)


def _metadata(settings: OAuthSettings) -> dict[str, Any]:
    return {
        "client_name": "Modelyard",
        "redirect_uris": [REDIRECT.format(port=settings.redirect_port)],
        "grant_types": ["authorization_code", "refresh_token"],
        "response_types": ["code"],
        "scope": settings.scope,
    }


class TokenFile:
    """The library's `TokenStorage`: one file per server, with the tokens and the client that it was issued to.

    The file is for one URL: a server of the same name at another address never gets its tokens. The library forgets
    when a token ends between two sessions, so the file has the time; a token that has ended is left empty, which makes
    the library renew it. `is_needed`: without tokens a session cannot begin."""

    def __init__(
        self, name: str, url: str, settings: OAuthSettings, secret: str | None, folder: Path, *, is_needed: bool
    ) -> None:
        self._name, self._url, self._settings, self._secret = name, url, settings, secret
        self._path = folder / f"{name}.json"
        self._is_needed = is_needed and settings.grant == "authorization_code"

    async def get_tokens(self) -> OAuthToken | None:
        from mcp.shared.auth import OAuthToken

        kept = self._read()
        if "tokens" not in kept:
            if self._is_needed:
                await self.ask_for_login()
            return None
        tokens = OAuthToken.model_validate(kept["tokens"])
        if time.time() > kept.get("expires_at", float("inf")):
            tokens.access_token = ""
        return tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        ends = {} if tokens.expires_in is None else {"expires_at": time.time() + tokens.expires_in}
        kept = {name: value for name, value in self._read().items() if name != "expires_at"}
        self._write(kept | {"tokens": tokens.model_dump(mode="json", exclude_none=True)} | ends)

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        from mcp.shared.auth import OAuthClientInformationFull

        settings = self._settings
        if settings.client_id is None or settings.client_id.startswith("https://"):
            kept = self._read().get("client")
            return None if kept is None else OAuthClientInformationFull.model_validate(kept)
        method = settings.client_auth if self._secret else "none"
        known = {"client_id": settings.client_id, "client_secret": self._secret, "issuer": settings.issuer}
        return OAuthClientInformationFull.model_validate(
            _metadata(settings) | known | {"token_endpoint_auth_method": method}
        )

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._write(self._read() | {"client": client_info.model_dump(mode="json", exclude_none=True)})

    async def ask_for_login(self, _url: str = "") -> Any:
        raise LoginNeeded(f"the MCP server {self._name!r} needs a login: run modelyard mcp login {self._name}")

    def _read(self) -> dict[str, Any]:
        try:
            kept: dict[str, Any] = msgspec.json.decode(self._path.read_bytes(), type=dict)
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"{self._path} cannot be read ({error}): delete it and log in again") from None
        return kept if kept.get("url") == self._url else {}

    def _write(self, kept: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = self._path.with_suffix(f".{os.getpid()}")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(kept | {"url": self._url}))
        new.replace(self._path)
