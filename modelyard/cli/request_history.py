"""The last requests of a session on a running server, and why its cache had no more of them: `modelyard explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import httpx

from modelyard.core.errors import Forbidden, InvalidRequest, ModelyardError, NotFound, Unavailable

COLUMNS = ("ended", "prompt", "reused", "evaluated", "output", "cause", "from token")
_MOST = 1000  # as many as the admin API tells
_KEY_WANTED = {401: "this server wants a key: --key or MODELYARD_API_KEY", 403: "this key is no administrator's"}

Row = tuple[str, ...]


def rows(url: str, key: str | None, session: str | None, last: int) -> tuple[str, list[Row]]:
    """A heading, and the requests, the newest last. `session` is the end of a session's name, or that of the newest."""
    ended: Sequence[Mapping[str, Any]] = _get(f"{url.rstrip('/')}/v1/admin/requests?limit={_MOST}", key)["ended"]
    if not ended:
        raise NotFound(f"{url} has answered nothing yet")
    chosen = list(_of_session(ended, session))[:last]
    if not chosen:
        raise NotFound(f"none of the last {len(ended)} requests belongs to a session that ends in {session!r}")
    heading = f"session {chosen[0]['session'] or '(none)'}, cache {chosen[0]['cache']}"
    return heading, [_row(one) for one in reversed(chosen)]


def _of_session(ended: Sequence[Mapping[str, Any]], session: str | None) -> Iterator[Mapping[str, Any]]:
    wanted = ended[0]["session"]
    for one in ended:
        if one["session"] == wanted if session is None else (one["session"] or "").endswith(session):
            yield one


def _row(one: Mapping[str, Any]) -> Row:
    usage, reuse = one["usage"], one["reuse"]
    when = datetime.fromtimestamp(one["at"]).astimezone().strftime("%H:%M:%S")
    if reuse is None:  # an engine that renders by itself, or that never had a place for it
        counted = (usage["prompt"], usage["cached"], usage["prompt"] - usage["cached"])
        return (when, *map(str, counted), str(usage["output"]), f"({one['status']})", "")
    counted = (reuse["reused"] + reuse["evaluated"], reuse["reused"], reuse["evaluated"])
    return (when, *map(str, counted), str(usage["output"]), reuse["cause"], _place(reuse))


def _place(reuse: Mapping[str, Any]) -> str:
    if reuse["token"] is None:
        return ""
    message = reuse["message"]
    return str(reuse["token"]) + ("" if message is None else f", message {message} ({reuse['role'] or 'gone'})")


def _get(url: str, key: str | None) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx.get(url, headers=headers, timeout=30, trust_env=False)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InvalidRequest(f"{url} is not a URL: {error}") from None
    except httpx.HTTPError as error:
        raise Unavailable(f"no server answers at {url}: {error}; --url names another") from None
    if reply.status_code != 200:
        raise _refused(url, reply.status_code)
    found: dict[str, Any] = reply.json()
    return found


def _refused(url: str, status: int) -> ModelyardError:
    if status in _KEY_WANTED:
        return Forbidden(_KEY_WANTED[status])
    return Unavailable(f"{url} answered {status}: is it a modelyard?")
