"""The rounds of a request that calls tools of MCP servers, with an engine and tools that the test controls by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from modelyard.config.load import load_config
from modelyard.core.errors import Cancelled, Unavailable, Unsupported
from modelyard.core.events import Event, Failed, Finished, Reply, collect_reply
from modelyard.core.pool import LeaseRequest
from modelyard.core.request import Audio, Image, Text, Tool, ToolCall, ToolResult, ToolServer
from modelyard.gateway.tool_rounds import ToolRounds
from modelyard.mcp.connection import McpResult, McpTool
from modelyard.mcp.servers import McpServers
from modelyard.mcp.settings import McpSettings
from tests.gateway.harness import CALLER, GatewayHarness, ManualGeneration, make_request
from tests.live_server import demo_config

NAMED = Tool("mcp", kind="server", type="mcp", server=ToolServer(label="math"))
MINE = Tool("mine", "Mine.", {"type": "object"})


class ManualTools:
    """A connection whose calls wait until the test answers them."""

    name = "math"

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any], asyncio.Future[McpResult]]] = []
        self.cancelled = 0

    async def tools(self) -> tuple[McpTool, ...]:
        return (McpTool("add", "Add.", {"type": "object"}),)

    async def call(self, name: str, arguments: dict[str, Any]) -> McpResult:
        answer: asyncio.Future[McpResult] = asyncio.get_running_loop().create_future()
        self.calls.append((name, arguments, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def answer(self, number: int, *parts: Any) -> None:
        self.calls[number][2].set_result(McpResult(parts))

    async def close(self) -> None: ...


class RoundsHarness(GatewayHarness):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        servers = McpServers(McpSettings.model_validate({"servers": {"math": {"command": "x"}}, **settings}), {})
        self.tools = ManualTools()
        servers._configured = {"math": self.tools}  # type: ignore[dict-item]
        self.gateway.preparer.mcp = servers
        self.events: list[Event] = []

    async def begin(self, *own: Tool, **request: Any) -> asyncio.Task[None]:
        """Start a request and read it in a task."""
        prepared = await self.gateway.prepare(make_request(tools=(NAMED, *own), **request), CALLER)
        self.stream = self.gateway.start(prepared)
        assert isinstance(self.stream, ToolRounds)
        return asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for _, events in self.stream:
            self.events += events
        self.stream.close()

    async def called(self, number: int) -> None:
        await settle(lambda: len(self.tools.calls) > number)

    def reply(self) -> Reply:
        return collect_reply(self.events)

    @property
    def record(self) -> Any:
        (record,) = self.gateway.history.recent(10)
        return record


async def settle(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - images are checked in a thread
            await asyncio.sleep(0)


@pytest.fixture
async def harness() -> AsyncIterator[RoundsHarness]:
    async with RoundsHarness() as made:
        yield made


def write_calls(generation: ManualGeneration, *names: str) -> None:
    generation.accept()
    for number, name in enumerate(names):
        call = json.dumps({"name": name, "arguments": {"n": number}})
        generation.write(f"<tool_call>\n{call}\n</tool_call>\n")
    generation.end()


async def test_the_next_round_begins_with_the_call_and_its_result(harness: RoundsHarness) -> None:
    reading = await harness.begin()
    write_calls(await harness.generation(0), "add")
    await harness.called(0)
    assert harness.running == 0  # no slot is held while the tool runs
    assert harness.gateway.running.by_trace()["t1"].tools == ("math.add",)
    harness.tools.answer(0, Text("three"))
    second = await harness.generation(1)
    prompt = harness.gateway.lookup.models["demo"].pipeline.tokenizer.decode(second.prompt.parts[0].ids)  # type: ignore[union-attr]
    assert prompt.index("<tool_call>") < prompt.index("three")
    second.finish("It is three.")
    await reading
    call, result, text = (block.part for block in harness.reply().blocks)
    assert isinstance(call, ToolCall)
    assert (call.name, call.server) == ("add", "math")
    assert result == ToolResult(call.id, (Text("three"),))
    assert text == Text("It is three.")
    assert harness.record.status == "end"
    assert harness.record.usage == harness.reply().finished.usage
    assert [(run.server, run.tool, run.status) for run in harness.record.calls] == [("math", "add", "ok")]
    assert not harness.gateway.running.by_trace()


async def test_calls_of_one_turn_run_at_the_same_time_and_keep_their_order(harness: RoundsHarness) -> None:
    reading = await harness.begin()
    write_calls(await harness.generation(0), "add", "add")
    await harness.called(1)
    harness.tools.answer(1, Text("second"))
    harness.tools.answer(0, Text("first"))
    (await harness.generation(1)).finish("Done.")
    await reading
    results = [block.part for block in harness.reply().blocks if isinstance(block.part, ToolResult)]
    assert [result.content for result in results] == [(Text("first"),), (Text("second"),)]


async def test_a_cancelled_request_cancels_its_calls(harness: RoundsHarness) -> None:
    reading = await harness.begin()
    write_calls(await harness.generation(0), "add", "add")
    await harness.called(1)
    assert harness.gateway.running.cancel("t1", Cancelled("an administrator cancelled it")) == 1
    await reading
    assert harness.tools.cancelled == 2
    assert harness.events[-1] == Failed(Cancelled("an administrator cancelled it"))
    assert not harness.record.failed
    assert [run.status for run in harness.record.calls] == ["cancelled", "cancelled"]


async def test_a_reader_that_leaves_cancels_the_calls(harness: RoundsHarness) -> None:
    reading = await harness.begin()
    write_calls(await harness.generation(0), "add")
    await harness.called(0)
    reading.cancel()
    harness.stream.close()
    await settle(lambda: harness.tools.cancelled == 1)
    assert harness.record.status == "cancelled"


async def test_a_shutdown_ends_a_request_whose_tool_runs(harness: RoundsHarness) -> None:
    reading = await harness.begin()
    write_calls(await harness.generation(0), "add")
    await harness.called(0)
    harness.gateway.running.end(Unavailable("the server is shutting down"))
    await reading
    assert harness.events[-1] == Failed(Unavailable("the server is shutting down"))


async def test_an_engine_that_fails_in_a_later_round_ends_the_stream_once(harness: RoundsHarness) -> None:
    reading = await harness.begin()
    write_calls(await harness.generation(0), "add")
    await harness.called(0)
    harness.tools.answer(0, Text("three"))
    second = await harness.generation(1)
    second.accept()
    second.write("It")
    second.end("error", Unavailable("out of memory"))
    await reading
    ends = [event for event in harness.events if isinstance(event, Finished | Failed)]
    assert ends == [Failed(Unavailable("out of memory"))]
    assert harness.record.failed


async def test_max_tokens_counts_all_rounds(harness: RoundsHarness) -> None:
    reading = await harness.begin(max_tokens=200)
    write_calls(await harness.generation(0), "add")
    await harness.called(0)
    harness.tools.answer(0, Text("three"))
    second = await harness.generation(1)
    assert 0 < second.prompt.max_tokens < 200
    second.finish()
    await reading


async def test_a_key_is_charged_for_one_request(harness: RoundsHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    leases: list[LeaseRequest] = []
    request = harness.scheduler.request
    monkeypatch.setattr(harness.scheduler, "request", lambda wanted: leases.append(wanted) or request(wanted))
    reading = await harness.begin()
    write_calls(await harness.generation(0), "add")
    await harness.called(0)
    harness.tools.answer(0, Text("three"))
    (await harness.generation(1)).finish()
    await reading
    assert [lease.is_retry for lease in leases] == [False, True]


async def test_results_that_fill_the_window_end_the_reply(harness: RoundsHarness) -> None:
    reading = await harness.begin()
    write_calls(await harness.generation(0), "add")
    await harness.called(0)
    harness.tools.answer(0, Text("three " * 5000))
    await reading
    assert harness.reply().finished.reason == "window"


async def test_a_call_of_the_client_goes_to_the_client(harness: RoundsHarness) -> None:
    reading = await harness.begin(MINE)
    write_calls(await harness.generation(0), "add", "mine")
    await harness.called(0)
    harness.tools.answer(0, Text("three"))
    await reading
    kinds = [(type(block.part).__name__, getattr(block.part, "server", None)) for block in harness.reply().blocks]
    assert kinds == [("ToolCall", "math"), ("ToolCall", None), ("ToolResult", None)]
    assert harness.reply().finished.reason == "tool_calls"


async def test_media_that_would_be_refused_is_replaced_by_a_text(harness: RoundsHarness) -> None:
    reading = await harness.begin()
    write_calls(await harness.generation(0), "add")
    await harness.called(0)
    harness.tools.answer(0, Image("data:image/png;base64,?"), Audio("data:audio/wav;base64,AAAA"), Text("x"))
    (await harness.generation(1)).finish()
    await reading
    result = harness.reply().blocks[1].part
    assert isinstance(result, ToolResult)
    first, second, third = (part.text for part in result.content if isinstance(part, Text))
    assert first.startswith("[image: the data: URL")
    assert (second, third) == ("[audio, which is not passed on]", "x")


async def test_a_model_that_cannot_call_tools_gets_none_of_its_route(harness: RoundsHarness) -> None:
    routes = {
        "routes": [{"match": "*", "cache": "main", "mcp": "math"}],
        "mcp": {"servers": {"math": {"command": "x"}}},
    }
    harness.gateway.lookup.router = load_config(env={}, overrides=demo_config() | routes).config.router()
    offered = await harness.gateway.prepare(make_request(), CALLER)
    assert [tool.name for tool in offered.request.tools] == ["add"]
    info = harness.engine.info
    harness.engine.info = replace(info, capabilities=replace(info.capabilities, tools=False))
    without = await harness.gateway.prepare(make_request(), CALLER)
    assert without.server_tools is None
    with pytest.raises(Unsupported, match="cannot call tools"):
        await harness.gateway.prepare(make_request(tools=(NAMED,)), CALLER)


async def test_more_calls_than_allowed_are_not_run() -> None:
    async with RoundsHarness(max_calls=1, max_rounds=1, max_output_chars=100) as harness:
        reading = await harness.begin()
        write_calls(await harness.generation(0), "add", "add")
        await harness.called(0)
        harness.tools.answer(0, Text("y" * 300))
        last = await harness.generation(1)
        tools = harness.gateway.lookup.models["demo"].pipeline.tokenizer.decode(last.prompt.parts[0].ids)  # type: ignore[union-attr]
        assert '"description": "Add."' not in tools  # it must answer now
        last.finish("Enough.")
        await reading
        assert len(harness.tools.calls) == 1
        results = [block.part for block in harness.reply().blocks if isinstance(block.part, ToolResult)]
        assert [result.is_error for result in results] == [False, True]
        assert results[0].content[-1] == Text("[200 more characters were left out]")
