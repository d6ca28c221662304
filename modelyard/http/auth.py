"""Authentication: API keys, the Host and Origin checks of a loopback server, and the rule for other addresses."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from modelyard.accounts.keys import Key, KeyRing
from modelyard.accounts.owner import OWNER_HEADER, USER_HEADER, OwnerProof, Role, includes
from modelyard.core.errors import Forbidden, InvalidRequest, Unauthenticated
from modelyard.core.request import is_api_key
from modelyard.http.request_context import GOOGLE_KEY, RequestContext
from modelyard.http.routes import WORKBENCH
from modelyard.http.settings import HttpSettings

_MAX_KNOWN_HOSTS = 64
_MAX_QUOTED = 256  # characters of a client's text in our messages


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    if host in ("localhost", "") or host.endswith(".localhost"):
        return host != ""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(settings: HttpSettings, keys: Sequence[Key]) -> None:
    """A server that is reachable from other machines needs API keys."""
    if not is_loopback(settings.host) and not keys:
        raise InvalidRequest(
            f"refusing to listen on {settings.host} without an API key: everyone on the network could use this server. "
            "Set MODELYARD_API_KEY (or [[keys]] in the configuration), create a key (modelyard keys create NAME "
            "--admin), or listen on 127.0.0.1.",
            code="bind_refused",
        )


def require(context: RequestContext, role: Role) -> None:
    """Raise unless the request may do what needs this role."""
    if includes(context.role, role):
        return
    if role != "owner" and context.role == "member":
        raise Forbidden("this needs an admin key", code="admin_key_required")
    raise Forbidden(
        "only the owner of this server may do this. Its user on its machine may: with the modelyard command, or in the "
        "workbench, with a link that `modelyard workbench` prints. From elsewhere it takes a key with the role owner, "
        "which that user creates: modelyard keys create NAME --role owner",
        code="owner_required",
    )


class Authenticator:
    """Admits or refuses each request before anything else happens, and says what role it has. Routes say which one
    they need."""

    def __init__(self, settings: HttpSettings, keys: KeyRing, owner: OwnerProof | None = None) -> None:
        self._keys, self._owner = keys, owner or OwnerProof()
        self._is_loopback = is_loopback(settings.host)
        self._hosts = frozenset(h.lower() for h in (settings.host, *settings.allowed_hosts))
        self._known_hosts: set[str] = set()  # accepted Host headers; nearly all clients send the same
        self._origins = frozenset(settings.cors_origins or ("*",)) if settings.cors_enabled else frozenset()

    def admit(self, context: RequestContext, user: Callable[[], str] = str) -> None:
        """`user` tells which user of the machine the client is: see `local_user`."""
        if self._is_loopback:
            self._check_host(context.headers.get("host", ""))
        is_workbench = context.row is not None and context.row.handler == WORKBENCH
        if (origin := context.headers.get("origin")) is not None:
            self._check_origin(origin, context.headers.get("host", ""), is_workbench)
        if is_workbench and context.headers.get("sec-fetch-site") == "cross-site":
            message = "the workbench is not opened by other web pages: type its address, or use a bookmark"
            raise Forbidden(message, code="cross_site")  # each page takes memory, also one in a foreign <img>
        self._identify(context, user)

    def _check_host(self, header: str) -> None:
        """DNS rebinding: a web page that resolves its name to 127.0.0.1 still sends that name in Host."""
        if header in self._known_hosts:
            return
        host = _hostname(header)
        if not host or is_loopback(host) or host in self._hosts:
            if len(self._known_hosts) < _MAX_KNOWN_HOSTS and len(header) <= _MAX_QUOTED:
                self._known_hosts.add(header)
            return
        raise Forbidden(
            f"the Host {host[:_MAX_QUOTED]!r} is not one of this server's names; "
            "use localhost, or add it to http.allowed_hosts",
            code="host_not_allowed",
        )

    def _check_origin(self, origin: str, host: str, same_origin_only: bool) -> None:
        """CORS only hides the reply from a foreign page; the request must be refused."""
        if not same_origin_only and ("*" in self._origins or origin in self._origins):
            return
        if host and origin.partition("://")[2].lower() == host.lower():
            return
        raise Forbidden(
            f"requests from web pages of {origin[:_MAX_QUOTED]} are not allowed; "
            "add it to http.cors_origins and set cors_enabled",
            code="origin_not_allowed",
        )

    def act_for(self, context: RequestContext, name: str) -> None:
        """Admit what runs without its client, with the key of this name, or for a user of a server without keys."""
        if not is_api_key(name) and not self._keys.keys:
            context.key = name
            return
        now = time.time()
        key = next((key for key in self._keys.keys if key.name == name and key.state(now) == "active"), None)
        if key is None:
            raise Unauthenticated(f"the API key {name!r} was revoked, or has expired")
        self._use(context, key)

    def _use(self, context: RequestContext, key: Key) -> None:
        context.key, context.role, context.allowed = key.name, key.role, key.models
        context.allow_remote, context.forbid_remote = key.allow_remote is True, key.allow_remote is False

    def _identify(self, context: RequestContext, user: Callable[[], str]) -> None:
        is_proved = OWNER_HEADER in context.headers and self._owner.is_proved(context.headers[OWNER_HEADER])
        is_owner = is_proved and USER_HEADER not in context.headers
        if not self._keys.keys and self._is_loopback:
            context.role = "local"
            context.key = context.headers.get(USER_HEADER, "") if is_proved else user()
            context.allow_remote = context.headers.get("x-modelyard-allow-remote", "").lower() == "true"
        elif (key := self._keys.match(_secrets(context.headers))) is not None:
            self._use(context, key)
        elif not is_owner and not (context.row is not None and context.row.is_open):
            raise Unauthenticated(
                "the API key is missing or wrong; send it as 'Authorization: Bearer <key>' or 'x-api-key: <key>'"
            )
        if is_owner:
            context.role = "owner"


def _secrets(headers: Mapping[str, str]) -> list[str]:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    secrets = [headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
    secrets.append(headers.get(GOOGLE_KEY, ""))
    return [secret for secret in secrets if secret]


def _hostname(header: str) -> str:
    """The name without port and IPv6 brackets."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
