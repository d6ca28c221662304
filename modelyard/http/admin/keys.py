"""The endpoints of API keys and their usage: /v1/admin/keys and /v1/admin/usage."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any

import msgspec
from fastapi import Query
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response

from modelyard.accounts.accounts import Accounts
from modelyard.accounts.keys import Key
from modelyard.accounts.owner import includes
from modelyard.accounts.settings import KeyRules, NewKey
from modelyard.accounts.usage import UsageCounts, period
from modelyard.core.errors import InvalidRequest
from modelyard.http.admin.context import AdminContext
from modelyard.http.auth import is_loopback, require
from modelyard.http.request_context import RequestContext
from modelyard.http.settings import HttpSettings

_GROUPS = ("key", "model", "day")
_DEFAULT_DAYS = 30
_FIRST_DAY = date(1970, 1, 1)
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent")


class KeyRoutes:
    def __init__(self, context: AdminContext, settings: HttpSettings) -> None:
        self._context, self._accounts, self._settings = context, context.accounts, settings

    async def keys(self, request: StarletteRequest, revoked: bool = False, own: bool = False) -> Response:
        """It also makes this process read keys that another one has changed."""
        await self._accounts.refresh()
        if own:
            return _json({"object": "list"})
        listed = await list_keys(self._accounts, self._context.clock(), revoked=revoked)
        if (only := _only(request)) is not None:
            listed["data"] = [key for key in listed["data"] if key["name"] == only and key["state"] != "revoked"]
        return _json(listed)

    async def log_in(self, request: StarletteRequest) -> Response:
        secret, until = await self._accounts.log_in(_bearer(request))
        await self._tell_peers(request)
        return _json({"secret": secret, "expires": until}, 201)

    async def log_out(self, request: StarletteRequest) -> Response:
        await self._accounts.log_out(_bearer(request))
        await self._tell_peers(request)
        return _json({"deleted": True})

    async def create(self, request: StarletteRequest, body: NewKey) -> Response:
        require(RequestContext.of(request.scope), body.role)
        key, secret = await self._accounts.create(body, open_to_all=not self._accounts.ring.keys)
        await self._tell_peers(request)
        (described,) = await describe_keys(self._accounts, self._context.clock(), key)
        return _json({**described, "secret": secret, "warnings": self._warnings(key)}, 201)

    async def change(self, request: StarletteRequest, id: str, body: KeyRules) -> Response:
        changes = body.model_dump(exclude_unset=True)
        if not changes:
            raise InvalidRequest("the body names no field to change")
        self._check_role(request, id)
        require(RequestContext.of(request.scope), body.role)
        key = await self._accounts.change(id, changes)
        await self._tell_peers(request)
        (described,) = await describe_keys(self._accounts, self._context.clock(), key)
        return _json({**described, "warnings": self._warnings(key)})

    async def revoke(self, request: StarletteRequest, id: str) -> Response:
        self._check_role(request, id)
        key = await self._accounts.revoke(id, may_open=is_loopback(self._settings.host))
        await self._tell_peers(request)
        (described,) = await describe_keys(self._accounts, self._context.clock(), key)
        return _json(described)

    def _check_role(self, request: StarletteRequest, id: str) -> None:
        """Nobody changes a key that may do more than they."""
        if (key := next((each for each in self._accounts.ring.keys if each.id == id), None)) is not None:
            require(RequestContext.of(request.scope), key.role)

    async def _tell_peers(self, request: StarletteRequest) -> None:
        """Before the reply: what it says is then true in every process."""
        await self._context.peers.request("GET", "keys", request.headers)

    def _warnings(self, key: Key) -> list[str]:
        has_limits = any(getattr(key, name) is not None for name in _LIMITS)
        return [self._context.limits_warning] if has_limits and self._context.limits_warning else []

    async def usage(
        self,
        request: StarletteRequest,
        by: Annotated[str, Query(max_length=40)] = "key",
        first: Annotated[date | None, Query(alias="from")] = None,
        last: Annotated[date | None, Query(alias="to")] = None,
        key: str | None = None,
        model: str | None = None,
    ) -> Response:
        """`by`: one or more of key, model and day, with commas. Days are of UTC; `from` and `to` are included."""
        only = _only(request)
        key = key if only is None else only
        groups = tuple(dict.fromkeys(by.split(",")))
        if not set(groups) <= set(_GROUPS):
            raise InvalidRequest(f"by takes {', '.join(_GROUPS)}, or several of them with commas", param="by")
        last = last or datetime.fromtimestamp(self._context.clock(), UTC).date()
        first = first or last - timedelta(days=_DEFAULT_DAYS - 1)
        if first > last:
            raise InvalidRequest(f"from ({first}) is after to ({last})", param="from")
        rows = await self._accounts.usage(groups, _day(first), _day(last), key, model)
        total = UsageCounts()
        for _, counts in rows:
            total.add(counts)
        return _json(
            {
                "object": "list",
                "by": list(groups),
                "from": first.isoformat(),
                "to": last.isoformat(),
                "currency": self._accounts.currency,
                "data": [{**_named(groups, values), **_counts(counts)} for values, counts in rows],
                "total": _counts(total),
            }
        )


def _only(request: StarletteRequest) -> str | None:
    """The key whose entries the sender may see; None: all."""
    context = RequestContext.of(request.scope)
    return None if includes(context.role, "operator") else context.key


def _bearer(request: StarletteRequest) -> str:
    return request.headers.get("authorization", "").partition(" ")[2].strip()


async def list_keys(accounts: Accounts, now: float, *, revoked: bool) -> dict[str, Any]:
    keys = (*accounts.ring.keys, *(accounts.revoked() if revoked else ()))
    data = await describe_keys(accounts, now, *keys)
    return {"object": "list", "currency": accounts.currency, "data": data}


async def describe_keys(accounts: Accounts, now: float, *keys: Key) -> list[dict[str, Any]]:
    used = await accounts.usage_of_keys(keys)
    return [describe_key(key, used.get(key.name, UsageCounts()), now) for key in keys]


def describe_key(key: Key, used: UsageCounts, now: float) -> dict[str, Any]:
    """Without its digest. `used` is of the budget's period."""
    rules = {name: getattr(key, name) for name in KeyRules.model_fields}
    tokens, cost = key.token_budget, key.cost_budget
    has_budget = tokens is not None or cost is not None
    return {
        "object": "key",
        "id": key.id,
        "name": key.name,
        "source": "config" if key.is_configured else "created",
        "state": key.state(now),
        "hint": key.hint,
        **rules,
        "models": list(key.models),
        "created": key.created,
        "revoked": key.revoked,
        "last_used": used.last or None,
        "usage": _counts(used),
        "budget": {
            "tokens_left": None if tokens is None else max(0, tokens - used.prompt - used.output),
            "cost_left": None if cost is None else max(0.0, cost - used.cost),
            "resets": period(key.budget_period, now)[1] if has_budget else None,
        },
    }


def _counts(counts: UsageCounts) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(counts)
    del found["last"]
    return found


def _named(groups: tuple[str, ...], values: tuple[int | str, ...]) -> Mapping[str, int | str]:
    return {name: _date(value) if name == "day" else value for name, value in zip(groups, values, strict=True)}


def _day(day: date) -> int:
    return (day - _FIRST_DAY).days


def _date(day: int | str) -> str:
    return (_FIRST_DAY + timedelta(days=int(day))).isoformat()


def _json(value: Any, status: int = 200) -> Response:
    """Not masked: nothing of it comes from an engine, and the secret of a new key is for the one who created it."""
    return Response(msgspec.json.encode(value), status, {"cache-control": "no-store"}, media_type="application/json")
