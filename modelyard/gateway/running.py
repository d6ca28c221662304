"""The requests that wait or run in this process: how far they are, their output as it comes, and how they are ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from modelyard.core.errors import ModelyardError
from modelyard.core.pool import ModelStatus, RequestSnapshot
from modelyard.gateway.choices import MultiChoiceStream
from modelyard.gateway.dedup import RequestDeduplicator
from modelyard.gateway.output import TextOutput
from modelyard.gateway.stream import ChoiceStream
from modelyard.gateway.tool_rounds import ToolRounds
from modelyard.tokenizer.shield import unshield


class RunningRequest(msgspec.Struct, frozen=True):
    """How far a request is: tokens of its prompt, how many were cached and how many are read by now, and its output.
    `tools` of MCP servers are running for it."""

    prompt: int
    cached: int
    read: int
    output: int
    endpoint: str
    tools: tuple[str, ...] = ()


class RunningRequests:
    """A stream is in `streams` from its start until it is closed. A request whose model calls servers' tools has one
    for all rounds (`ToolRounds`) and, while it generates, one for the round."""

    def __init__(self) -> None:
        self.dedup = RequestDeduplicator()
        self.streams: set[ChoiceStream | MultiChoiceStream | ToolRounds] = set()

    def _generations(self) -> list[ChoiceStream | MultiChoiceStream]:
        return [stream for stream in self.streams if not isinstance(stream, ToolRounds)]

    def _rounds(self) -> list[ToolRounds]:
        return [stream for stream in self.streams if isinstance(stream, ToolRounds)]

    def by_trace(self) -> dict[str, RunningRequest]:
        """The requests of this process with their counts so far."""
        running = {stream.prepared.caller.trace: _running(stream) for stream in self._generations()}
        for rounds in self._rounds():
            caller, usage, tools = rounds.prepared.caller, rounds.usage, rounds.running_tools
            if tools or caller.trace not in running:
                running[caller.trace] = RunningRequest(
                    usage.prompt, usage.cached, usage.prompt, usage.output, caller.endpoint, tools
                )
        return running

    def progress(self, trace: str, status: Mapping[str, ModelStatus]) -> dict[str, Any]:
        """What a request of this process does before its first output: it is queued, its model is loaded, or its prompt
        is read."""
        found = next((stream for stream in self._generations() if stream.prepared.caller.trace == trace), None)
        if found is None:
            return {}
        if _first_choice(found).has_lease:
            at = _running(found)
            return {"state": "reading", "total": at.prompt, "cached": at.cached, "done": at.read} if at.prompt else {}
        model = status.get(found.prepared.model.name)
        if model is None or model.state == "ready":
            return {"state": "queued", "waiting": 0 if model is None else model.waiting}
        return {"state": "loading", "phase": model.phase, "progress": round(model.progress, 2)}

    def calling_tools(self) -> list[RequestSnapshot]:
        """The requests whose tools run now: the pool does not know them, because they hold no slot meanwhile."""
        return [rounds.snapshot() for rounds in self._rounds() if rounds.running_tools]

    def watch(self, trace: str) -> tuple[str, str] | None:
        """The prompt of a running request, and its raw output since the first call. None: it does not run here, or
        another server renders its prompt."""
        for stream in self._generations():
            if stream.prepared.caller.trace == trace:
                output = _first_choice(stream).output
                rendered = stream.prepared.rendered(0)
                if isinstance(output, TextOutput) and rendered is not None:
                    return unshield(rendered.text), output.watch()
        return None

    def cancel(self, trace: str, reason: ModelyardError) -> int:
        """Ends a request that shares the stream of another one or calls tools, and returns how many there were: the
        pool, which ends all others, does not know it."""
        calling = [one for one in self._rounds() if one.running_tools and one.prepared.caller.trace == trace]
        for rounds in calling:
            rounds.cancel(reason)
        return int(self.dedup.cancel(trace, reason)) + len(calling)

    def end(self, reason: ModelyardError, key: str | None = None) -> None:
        """End all that wait or run, or all of one key; their clients receive the reason."""
        for stream in (*self._rounds(), *self._generations()):
            if key is None or stream.prepared.caller.key == key:
                stream.cancel(reason)


def _running(stream: ChoiceStream | MultiChoiceStream) -> RunningRequest:
    output = _first_choice(stream).output
    usage, endpoint = output.usage, stream.prepared.caller.endpoint
    read = output.read if isinstance(output, TextOutput) and not output.tokens else usage.prompt
    return RunningRequest(usage.prompt, usage.cached, read, output.tokens, endpoint)


def _first_choice(stream: ChoiceStream | MultiChoiceStream) -> ChoiceStream:
    return stream if isinstance(stream, ChoiceStream) else stream.streams[0]
