"""Who may enter: API keys, the Host and Origin rules of a loopback server, and the rule for binding elsewhere."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache

from msgspec import Struct

from modelyard.core.errors import Forbidden, InvalidRequest, Unauthenticated
from modelyard.http.request_context import RequestContext
from modelyard.http.settings import HttpSettings, KeySettings

OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready"})
_ADMIN = "/v1/admin"
_WORKBENCH = "/workbench"
_FAMILIAR = 64
_LONGEST = 256  # of a client's own words in our sentences


class Key(Struct, frozen=True):
    name: str
    digest: bytes
    admin: bool
    allow_remote: bool


def read_keys(settings: Sequence[KeySettings], env: Mapping[str, str] = os.environ) -> tuple[Key, ...]:
    return tuple(Key(s.name, _digest(s, env), s.admin, s.allow_remote) for s in settings)


def _digest(key: KeySettings, env: Mapping[str, str]) -> bytes:
    if key.hash is not None:
        return bytes.fromhex(key.hash.removeprefix("sha256:"))
    secret = key.key if key.key is not None else env.get(key.env or "")
    if not secret:
        raise InvalidRequest(f"keys.{key.name}: the environment variable {key.env} is not set")
    return hashlib.sha256(secret.encode()).digest()


@lru_cache(maxsize=256)  # asked at every request, nearly always about the same name
def is_loopback(host: str) -> bool:
    if host in ("localhost", "") or host.endswith(".localhost"):
        return host != ""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(settings: HttpSettings, keys: Sequence[Key]) -> None:
    """A server that others can reach must know who they are."""
    if not is_loopback(settings.host) and not keys:
        raise InvalidRequest(
            f"refusing to listen on {settings.host} without an API key: anybody on the network could use this server. "
            "Set MODELYARD_API_KEY (or [[keys]] in the configuration), or listen on 127.0.0.1.",
            code="bind_refused",
        )


def is_workbench(path: str) -> bool:
    """The page itself holds no secrets: it asks for a key, and shows it at the admin API as any client would."""
    return path == _WORKBENCH or path.startswith(_WORKBENCH + "/")


class Authenticator:
    """Decides on each visit before anything else happens. Raises what is wrong."""

    def __init__(self, settings: HttpSettings, keys: Sequence[Key]) -> None:
        self._keys = tuple(keys)
        self._guarded = is_loopback(settings.host)
        self._hosts = frozenset(h.lower() for h in (settings.host, *settings.allowed_hosts))
        self._familiar: set[str] = set()  # Host headers that were found good: nearly all clients send the same
        self._origins = frozenset(settings.cors_origins or ("*",)) if settings.cors_enabled else frozenset()

    def admit(self, visit: RequestContext) -> None:
        if self._guarded:
            self._check_host(visit.headers.get("host", ""))
        if (origin := visit.headers.get("origin")) is not None:
            self._check_origin(origin, visit.headers.get("host", ""), is_workbench(visit.path))
        self._identify(visit)
        if visit.headers.get("x-modelyard-allow-remote", "").lower() == "true":
            visit.allow_remote = True

    def _check_host(self, header: str) -> None:
        """A web page that rebinds its own name to 127.0.0.1 still sends its own name in Host."""
        if header in self._familiar:
            return
        host = _hostname(header)
        if not host or is_loopback(host) or host in self._hosts:
            if len(self._familiar) < _FAMILIAR and len(header) <= _LONGEST:
                self._familiar.add(header)
            return
        raise Forbidden(
            f"the Host {host[:_LONGEST]!r} is not one of this server's names; "
            "use localhost, or add it to http.allowed_hosts",
            code="host_not_allowed",
        )

    def _check_origin(self, origin: str, host: str, ours_alone: bool) -> None:
        """CORS hides a reply from a foreign page but would still run its request: refuse the request itself."""
        if not ours_alone and ("*" in self._origins or origin in self._origins):
            return
        if host and origin.partition("://")[2].lower() == host.lower():
            return
        raise Forbidden(
            f"requests from web pages of {origin[:_LONGEST]} are not allowed; "
            "add it to http.cors_origins and set cors_enabled",
            code="origin_not_allowed",
        )

    def _identify(self, visit: RequestContext) -> None:
        if not self._keys:
            visit.admin = True  # nobody set keys: whoever reaches a loopback server owns it
            return
        key = self._match(visit.headers)
        if key is not None:
            visit.key, visit.admin, visit.allow_remote = key.name, key.admin, key.allow_remote
        elif visit.path not in OPEN_PATHS and not is_workbench(visit.path):
            raise Unauthenticated(
                "the API key is missing or wrong; send it as 'Authorization: Bearer <key>' or 'x-api-key: <key>'"
            )
        if visit.path.startswith(_ADMIN) and not visit.admin:
            raise Forbidden("this needs an admin key", code="admin_key_required")

    def _match(self, headers: Mapping[str, str]) -> Key | None:
        """Every key is compared with every secret shown, so that the time taken tells nothing."""
        found: Key | None = None
        for secret in _shown(headers):
            digest = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
            for key in self._keys:
                if hmac.compare_digest(digest, key.digest) and found is None:
                    found = key
        return found


def _shown(headers: Mapping[str, str]) -> list[str]:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    secrets = [headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
    return [secret for secret in secrets if secret]


def _hostname(header: str) -> str:
    """The name without its port; IPv6 addresses keep their brackets off."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
