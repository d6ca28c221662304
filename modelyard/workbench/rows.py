"""Requests as rows of a table, and what changed between two looks. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct, field

from modelyard.workbench.client import Json

_PATHS = {
    "/v1/chat/completions": "Chat",
    "/v1/responses": "Responses",
    "/v1/messages": "Messages",
    "/v1/completions": "Completions",
}
_LIVE_FIRST = 1e11  # those that still run stand above all that ended


class Changes(Struct):
    """Named as the grid's own transactions are."""

    add: list[Json] = field(default_factory=list)
    update: list[Json] = field(default_factory=list)
    remove: list[Json] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.add or self.update or self.remove)


class Table:
    """The rows that the page holds, by id: at most `limit`, the newest ones."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: dict[str, Json] = {}
        self.newest = 0.0  # unix time: what ended before is known

    @property
    def rows(self) -> list[Json]:
        return list(self._rows.values())

    def take(self, live: Iterable[Json], ended: Iterable[Json], now: float) -> Changes:
        """What the page has to change. `ended` may repeat what is known already."""
        found = merged([*(finished(one) for one in ended)])
        running = {row["id"]: row for row in (waiting(one, now) for one in live)}
        changes = Changes()
        for id, row in (found | running).items():
            if id not in self._rows:
                changes.add.append(row)
            elif self._rows[id] != row:
                changes.update.append(row)
            self._rows[id] = row
        self.newest = max([self.newest, *(row["at"] for row in found.values() if row["at"] < _LIVE_FIRST)])
        changes.remove = [{"id": id} for id in self._gone(running)]
        for one in changes.remove:
            del self._rows[one["id"]]
        return changes

    def _gone(self, running: dict[str, Json]) -> list[str]:
        """Those that left without a trace, and the oldest where there are too many."""
        lost = [id for id, row in self._rows.items() if row["live"] and id not in running]
        surplus = len(self._rows) - len(lost) - self._limit
        if surplus <= 0:
            return lost
        ended = sorted((row["at"], id) for id, row in self._rows.items() if not row["live"])
        return [*lost, *(id for _, id in ended[:surplus])]


def finished(one: Json) -> Json:
    usage, timings = one["usage"], one["timings"]
    return {
        "id": one["id"],
        "live": False,
        "status": one["status"],
        "failed": one["failed"],
        "model": one["model"],
        "cache": one["cache"],
        "client": client(one),
        "session": one["session"] or "",
        "queue": timings["queue"],
        "first": first_token(timings),
        "rate": one["tokens_per_s"],
        "prompt": usage["prompt"],
        "cached": usage["cached"],
        "output": usage["output"],
        "total": timings["total"],
        "at": one["at"],
        "act": "",
    }


def waiting(one: Json, now: float) -> Json:
    """One that runs or waits. Whole seconds: a table that changes ten times a second is not read."""
    place = f" ({one['position']}.)" if one["state"] == "waiting" and one["position"] else ""
    return {
        "id": one["id"],
        "live": True,
        "status": one["state"] + place,
        "failed": False,
        "model": one["model"],
        "cache": one["cache"],
        "client": one["key"],
        "session": (one["session"] or "").removeprefix(one["key"] + "/"),  # the queue tells keys' sessions apart
        "queue": round(one["waited"], 1),
        "first": None,
        "rate": None,
        "prompt": one["tokens"],
        "cached": None,
        "output": None,
        "total": float(int(max(0.0, now - one["since"]))),
        "at": one["since"] + _LIVE_FIRST,
        "act": "cancel",
    }


def merged(rows: Iterable[Json]) -> dict[str, Json]:
    """The choices of one request are one row."""
    found: dict[str, Json] = {}
    for row in rows:
        if (other := found.get(row["id"])) is None:
            found[row["id"]] = row
        else:
            worse, at = (row if row["failed"] else other), max(row["at"], other["at"])
            found[row["id"]] = {**worse, "output": row["output"] + other["output"], "at": at}
    return found


def client(one: Json) -> str:
    protocol = str(_PATHS.get(one["endpoint"], one["endpoint"]))
    return f"{one['key']} · {protocol}" if one["key"] else protocol


def first_token(timings: Json) -> float | None:
    """As the client felt it: the queue and the rendering count."""
    if timings["first_token"] is None:
        return None
    return sum(timings[name] or 0.0 for name in ("queue", "tokenize", "first_token"))


# --- a request's timeline ---------------------------------------------------------------------------------------------


def timeline(timings: Json) -> list[tuple[str, float]]:
    """Its phases with their seconds, in order; what nobody measured is left out."""
    first, prefill = timings.get("first_token"), timings.get("prefill")
    phases: list[tuple[str, Any]] = [
        ("tokenize", timings.get("tokenize")),
        ("queue", timings.get("queue")),
        ("prefill", first if first is not None else prefill),
        ("decode", timings.get("decode")),
    ]
    told = [(name, float(value)) for name, value in phases if value is not None]
    rest = (timings.get("total") or 0.0) - sum(value for _, value in told)
    return [*told, ("other", rest)] if rest > 0 else told
