"""Requests as the pages show them: table rows, a timeline, the use of the cache in sentences, events as lines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct, field

from modelyard.core.errors import ModelyardError
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Measured,
    PromptRead,
    Started,
)
from modelyard.core.protocol import WireProtocol
from modelyard.http.errors import load_protocol
from modelyard.workbench import formatting as fmt
from modelyard.workbench.api_client import Json
from modelyard.workbench.chat_request import PROTOCOLS

_ENDPOINT_NAMES = {
    "/v1/chat/completions": "Chat",
    "/v1/responses": "Responses",
    "/v1/messages": "Messages",
    "/v1/completions": "Completions",
}
_LIVE_OFFSET = 1e11  # added to the time of a live request, so that it sorts above all ended ones
_MISS_CAUSES = {
    "new_session": "It is the first request of its session.",
    "not_kept": "The engine keeps nothing between requests.",
    "other_session": "The session held another conversation before.",
    "evicted": "It continues the conversation, but the cache no longer held it.",
    "not_copied": "Another slot of the cache held more of it, but evaluating it again was cheaper than copying.",
    "billing_block": "A billing line of the client changed.",
    "system_changed": "The client changed its system prompt.",
    "tools_changed": "The client changed its tools.",
    "reasoning_dropped": "The reasoning of an earlier turn is no longer in the prompt.",
    "arguments_reserialised": "The client sent the arguments of a call back in another form.",
    "message_changed": "The client changed an earlier message.",
    "template": "The template renders the same messages differently.",
}


# --- the table --------------------------------------------------------------------------------------------------------


class RowChanges(Struct):
    """A transaction of the grid; its fields are named as AG Grid names them."""

    add: list[Json] = field(default_factory=list)
    update: list[Json] = field(default_factory=list)
    remove: list[Json] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.add or self.update or self.remove)


class RequestTable:
    """The rows on the page by id: all live requests and the newest ended ones, at most `limit` together."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: dict[str, Json] = {}
        self.newest = 0.0  # unix time of the last end in the table

    @property
    def rows(self) -> list[Json]:
        return list(self._rows.values())

    def update(self, live: Iterable[Json], ended: Iterable[Json], now: float) -> RowChanges:
        """Returns what changes on the page. `ended` may repeat requests that are in the table."""
        ended_rows = merge_choices(_ended_row(record) for record in ended)
        live_rows = {row["id"]: row for row in (_live_row(record, now) for record in live)}
        changes = RowChanges()
        for id, row in (ended_rows | live_rows).items():
            if id not in self._rows:
                changes.add.append(row)
            elif self._rows[id] != row:
                changes.update.append(row)
            self._rows[id] = row
        self.newest = max([self.newest, *(row["at"] for row in ended_rows.values() if row["at"] < _LIVE_OFFSET)])
        changes.remove = [{"id": id} for id in self._surplus(live_rows)]
        for removed in changes.remove:
            del self._rows[removed["id"]]
        return changes

    def _surplus(self, live_rows: dict[str, Json]) -> list[str]:
        """Live requests that vanished without a record, and the oldest ended ones beyond the limit."""
        vanished = [id for id, row in self._rows.items() if row["live"] and id not in live_rows]
        excess = len(self._rows) - len(vanished) - self._limit
        if excess <= 0:
            return vanished
        ended = sorted((row["at"], id) for id, row in self._rows.items() if not row["live"])
        return [*vanished, *(id for _, id in ended[:excess])]


def _ended_row(record: Json) -> Json:
    usage, timings = record["usage"], record["timings"]
    return {
        "id": record["id"],
        "live": False,
        "status": record["status"],
        "failed": record["failed"],
        "model": record["model"],
        "cache": record["cache"],
        "client": client_label(record),
        "session": record["session"] or "",
        "queue": timings["queue"],
        "first": time_to_first_token(timings),
        "rate": record["tokens_per_s"],
        "prompt": usage["prompt"],
        "cached": usage["cached"],
        "output": usage["output"],
        "total": timings["total"],
        "at": record["at"],
        "act": "",
    }


def _live_row(record: Json, now: float) -> Json:
    """A running or waiting request. Times are rounded so that the row changes at most once a second."""
    progress = record["progress"]
    return {
        "id": record["id"],
        "live": True,
        "status": live_state(record),
        "failed": False,
        "model": record["model"],
        "cache": record["cache"],
        "client": live_client(record),
        "session": (record["session"] or "").removeprefix(record["key"] + "/"),  # the queue prefixes sessions by key
        "queue": round(record["waited"], 1),
        "first": None,
        "rate": None,
        "prompt": record["tokens"],
        "cached": progress["cached"] if progress else None,
        "output": progress["output"] if progress else None,
        "total": float(int(max(0.0, now - record["since"]))),
        "at": record["since"] + _LIVE_OFFSET,
        "act": "cancel",
    }


def live_state(record: Json) -> str:
    """What a live request does now: its place in the queue, how much of its prompt is read, the tools that the server
    calls for it, or that it generates."""
    progress = record["progress"]
    if progress and progress.get("tools"):
        return f"calling {', '.join(progress['tools'])}"
    if record["state"] == "waiting":
        return f"waiting ({record['position']}.)" if record["position"] else "waiting"
    if progress and progress["prompt"] and not progress["output"]:
        return f"reading {fmt.percent(min(1.0, progress['read'] / progress['prompt']))}"
    return str(record["state"])


def live_client(record: Json) -> str:
    endpoint = record["progress"]["endpoint"] if record["progress"] else ""
    return client_label({"key": record["key"], "endpoint": endpoint}) if endpoint else record["key"]


def merge_choices(rows: Iterable[Json]) -> dict[str, Json]:
    """One row per request: several choices of one request are merged, and a failure wins."""
    merged: dict[str, Json] = {}
    for row in rows:
        if (other := merged.get(row["id"])) is None:
            merged[row["id"]] = row
        else:
            worse, at = (row if row["failed"] else other), max(row["at"], other["at"])
            merged[row["id"]] = {**worse, "output": row["output"] + other["output"], "at": at}
    return merged


def client_label(record: Json) -> str:
    protocol = str(_ENDPOINT_NAMES.get(record["endpoint"], record["endpoint"]))
    return f"{record['key']} · {protocol}" if record["key"] else protocol


# --- one request ------------------------------------------------------------------------------------------------------


def time_to_first_token(timings: Json) -> float | None:
    """As the client sees it: with the time in the queue and the time to tokenize."""
    if timings["first_token"] is None:
        return None
    return sum(timings[name] or 0.0 for name in ("queue", "tokenize", "first_token"))


def tool_run(call: Json) -> str:
    """One call of an MCP server's tool."""
    size = f" · {fmt.count(call['chars'])} characters" if call["chars"] else ""
    return f"{call['server']}.{call['tool']} · {call['status']} · {fmt.duration(call['seconds'])}{size}"


def timeline(timings: Json) -> list[tuple[str, float]]:
    """The phases in order with their seconds. Phases that were not measured are left out."""
    first, prefill = timings.get("first_token"), timings.get("prefill")
    phases: list[tuple[str, Any]] = [
        ("tokenize", timings.get("tokenize")),
        ("queue", timings.get("queue")),
        ("prefill", first if first is not None else prefill),
        ("decode", timings.get("decode")),
    ]
    measured = [(name, float(value)) for name, value in phases if value is not None]
    rest = (timings.get("total") or 0.0) - sum(value for _, value in measured)
    return [*measured, ("other", rest)] if rest > 0 else measured


def explain_cache_use(record: Json) -> Iterator[str]:
    """How much of the prompt came from the cache, and why not more, in sentences."""
    prompt, cached, divergence = record["usage"]["prompt"], record["usage"]["cached"], record["divergence"]
    if not prompt:
        yield "The request ended before its prompt was evaluated."
        return
    share = fmt.percent(cached / prompt)
    yield f"{fmt.count(cached)} of {fmt.count(prompt)} prompt tokens came from the cache ({share})."
    cause = record["reuse"]["cause"] if record["reuse"] is not None else None
    if divergence and divergence < prompt:
        yield f"The cache matched up to token {fmt.count(divergence)}; the rest was evaluated."
    elif divergence == 0 and cause != "not_copied":
        yield "Nothing in the cache started like this prompt."
    if cause in _MISS_CAUSES:
        yield _MISS_CAUSES[cause]
    if record["evicted"]:
        yield "No slot was free, so another conversation was evicted from the cache."


def event_lines(endpoint: str, response: str) -> list[str]:
    """The events of a reply, one per line, with consecutive deltas joined."""
    protocols = map(load_protocol, PROTOCOLS)
    protocol = next((protocol for protocol in protocols if endpoint in protocol.PATHS), None)
    if protocol is None or not response:
        return ["This reply has no events."]
    try:
        return list(_join_deltas(_read_events(protocol, response.encode("utf-8", "replace"))))
    except ModelyardError as error:
        return [error.message]


def _read_events(protocol: WireProtocol, body: bytes) -> list[Event]:
    if not body.lstrip().startswith(b"{"):
        reader = protocol.reader()
        return [*reader.feed(body), *reader.finish()]
    reply = protocol.read_reply(body)
    events: list[Event] = [reply.started]
    for index, block in enumerate(reply.blocks):
        part = block.part
        text = getattr(part, "text", "") or getattr(part, "arguments", "")
        kind: Any = part.__struct_config__.tag
        events += [BlockStart(index, kind, name=getattr(part, "name", "")), BlockDelta(index, text), BlockEnd(index)]
    return [*events, reply.finished]


def _join_deltas(events: Iterable[Event]) -> Iterator[str]:
    deltas: list[str] = []
    for event in events:
        if isinstance(event, BlockDelta):
            deltas.append(event.text)
            continue
        if deltas:
            yield f"delta ×{len(deltas)}  {''.join(deltas)}"
            deltas = []
        yield _event_line(event)
    if deltas:
        yield f"delta ×{len(deltas)}  {''.join(deltas)}"


def _event_line(event: Event) -> str:
    match event:
        case Started():
            return f"started  {event.model}"
        case BlockStart():
            return f"block {event.index}  {event.kind} {event.name}".rstrip()
        case BlockEnd():
            return f"end of block {event.index}" + ("" if event.complete else ", incomplete")
        case Finished():
            return f"finished  {event.reason}, {event.usage.prompt} + {event.usage.output} tokens"
        case Failed():
            return f"failed  {event.error.message}"
        case PromptRead():
            return f"prompt  {event.done} of {event.total} tokens read"
        case Measured():
            return f"measured  {event.usage.prompt} + {event.usage.output} tokens so far"
        case BlockDelta():
            return f"delta  {event.text}"
