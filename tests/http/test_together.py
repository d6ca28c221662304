"""Requests that came together go in step, those that have to wait become tasks, and a client may leave in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Scope

from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.http.disconnect import Farewells, enlist
from modelyard.http.together import Parade, next_turn, own_task
from modelyard.server.app import ServerApp
from modelyard.telemetry.request_capture import RequestCapture
from tests.http.front import load_all, yard
from tests.prompt.picture_server import PNG
from tests.serving import demo, serving

ASKED = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


class Client:
    """One request to the app as our own connection makes it, and what was sent back."""

    def __init__(self, *, stream: bool = False) -> None:
        self.asked = json.dumps(ASKED | {"stream": stream}).encode()
        self.sent: list[dict[str, Any]] = []
        self.farewells: Farewells = set()
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"host", b"localhost")],
        }
        enlist(self.scope, self.farewells)

    async def receive(self) -> Any:
        return {"type": "http.request", "body": self.asked, "more_body": False}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def asks(self, yard: ServerApp) -> Callable[[Scope], Coroutine[Any, Any, None]]:
        async def ask(scope: Scope) -> None:
            scope |= self.scope
            await yard.app(scope, self.receive, self.send)

        return ask

    @property
    def said(self) -> str:
        return str(json.loads(self.sent[1]["body"])["choices"][0]["message"]["content"])


@pytest.fixture
async def made() -> AsyncIterator[ServerApp]:
    """Loaded, so that the requests of a test wait for nothing but each other."""
    made = yard()
    try:
        await load_all(made)
        yield made
    finally:
        await made.stop()
        await made.gateway.close()


class Ground:
    """Where a parade marches: what is told of it, and which tasks there are."""

    def __init__(self) -> None:
        self.parade, self.tasks = Parade(), set[asyncio.Task[None]]()
        self.order: list[str] = []
        self.broken: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(lambda _, told: self.broken.append(str(told["exception"])))

    def join(self, *requests: Callable[[Scope], Coroutine[Any, Any, None]]) -> None:
        for request in requests:
            scope: Scope = {}
            self.parade.join(request(scope), scope, self._loop, self.tasks)

    async def finish(self) -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*self.tasks)


@pytest.fixture
async def ground() -> Ground:
    return Ground()


async def test_in_a_turn_everybody_else_goes_one_step_and_nobody_is_a_task(ground: Ground) -> None:
    async def one(name: str, scope: Scope) -> None:
        ground.order.append(f"{name} begins")
        await next_turn(scope)
        ground.order.append(f"{name} ends" if asyncio.current_task() is None else "a task")

    ground.join(partial(one, "a"), partial(one, "b"))
    assert ground.order == []
    await asyncio.sleep(0)
    assert ground.order == ["a begins", "b begins", "a ends", "b ends"]
    assert not ground.tasks


async def test_a_crowd_goes_in_companies_and_lets_the_loop_turn_in_between(ground: Ground) -> None:
    async def one(scope: Scope) -> None:
        await next_turn(scope)
        ground.order.append("ended")

    ground.join(*[one] * 150)
    counts = []
    for _ in range(4):
        await asyncio.sleep(0)
        counts.append(len(ground.order))
    assert counts == [64, 128, 150, 150]


async def test_tasks_go_in_step_too(ground: Ground) -> None:
    async def one(name: str) -> None:
        ground.order.append(f"{name} begins")
        await next_turn({})
        ground.order.append(f"{name} ends")

    await asyncio.gather(one("a"), one("b"))
    assert ground.order == ["a begins", "b begins", "a ends", "b ends"]


async def test_a_request_that_waits_becomes_a_task_and_holds_up_nobody(ground: Ground) -> None:
    ready = asyncio.Event()

    async def waiting(scope: Scope) -> None:
        await ready.wait()
        assert asyncio.current_task() in ground.tasks
        ground.order.append("waited")
        await next_turn(scope)
        ground.order.append("ended")

    async def quick(scope: Scope) -> None:
        await next_turn(scope)
        ground.order.append("quick")

    ground.join(waiting, quick)
    await asyncio.sleep(0)
    assert (ground.order, len(ground.tasks)) == (["quick"], 1)
    ready.set()
    await ground.finish()
    assert ground.order == ["quick", "waited", "ended"]
    await asyncio.sleep(0)
    assert not ground.tasks


@pytest.mark.parametrize("asks", [own_task, lambda _: asyncio.sleep(0)])
async def test_whoever_needs_a_task_gets_one(ground: Ground, asks: Callable[[Scope], Awaitable[None]]) -> None:
    seen: list[asyncio.Task[Any] | None] = []

    async def one(scope: Scope) -> None:
        seen.append(asyncio.current_task())
        await asks(scope)
        seen.append(asyncio.current_task())
        await asks(scope)
        seen.append(asyncio.current_task())

    ground.join(one)
    await asyncio.sleep(0)
    await ground.finish()
    assert seen[0] is None
    assert seen[1] is seen[2] is not None


async def test_a_cancelled_request_hears_of_it_where_it_waits_and_may_wait_again(ground: Ground) -> None:
    forever, ready = asyncio.Event(), asyncio.Event()

    async def one(_: Scope) -> None:
        try:
            await forever.wait()
        except asyncio.CancelledError:
            ground.order.append("cancelled")
            await ready.wait()
        ground.order.append("ended")

    async def gone(_: Scope) -> None:
        try:
            await forever.wait()
        except asyncio.CancelledError:
            ground.order.append("gone")

    ground.join(one, gone)
    await asyncio.sleep(0)  # they come to wait
    await asyncio.sleep(0)  # their tasks begin
    for task in ground.tasks:
        task.cancel()
    await asyncio.sleep(0)
    assert sorted(ground.order) == ["cancelled", "gone"]
    ready.set()
    await ground.finish()
    assert ground.order[2:] == ["ended"]


async def test_a_request_that_breaks_is_told_of_and_the_others_go_on(ground: Ground) -> None:
    async def broken(_: Scope) -> None:
        raise ValueError("no more")

    async def whole(scope: Scope) -> None:
        await next_turn(scope)
        ground.order.append("ended")

    ground.join(broken, whole)
    await asyncio.sleep(0)
    assert (ground.order, ground.broken) == (["ended"], ["no more"])


async def test_every_request_has_a_context_of_its_own(ground: Ground) -> None:
    name: ContextVar[str] = ContextVar("name", default="nobody")

    async def one(mine: str, scope: Scope) -> None:
        name.set(mine)
        await next_turn(scope)
        ground.order.append(name.get())
        await own_task(scope)
        ground.order.append(name.get())

    ground.join(partial(one, "a"), partial(one, "b"))
    await asyncio.sleep(0)
    await ground.finish()
    assert (ground.order, name.get()) == (["a", "b", "a", "b"], "nobody")


async def test_requests_that_came_together_are_all_placed_before_the_first_is_answered(made: ServerApp) -> None:
    clients = [Client() for _ in range(3)]
    tasks = [asyncio.ensure_future(made.app(c.scope, c.receive, c.send)) for c in clients]
    async with asyncio.timeout(60):
        while not all(client.farewells for client in clients):
            assert not any(client.sent for client in clients)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
    assert [client.said for client in clients] == ["Hello there."] * 3


async def test_a_request_that_waits_for_nothing_is_answered_within_a_turn_and_without_a_task(
    made: ServerApp, ground: Ground
) -> None:
    client = Client()
    ground.join(client.asks(made))
    await asyncio.sleep(0)
    assert client.said == "Hello there."
    assert not ground.tasks


async def test_places_are_given_in_the_order_of_coming_to_streams_and_whole_replies_alike(
    made: ServerApp, ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, start = list[bool](), made.gateway.start

    def started(job: PreparedRequest, entry: RequestCapture | None = None) -> Any:
        order.append(job.request.stream)
        return start(job, entry)

    monkeypatch.setattr(made.gateway, "start", started)
    for stream in (True, False, True, False):
        client = Client(stream=stream)
        ground.join(client.asks(made))
    await asyncio.sleep(0)
    await ground.finish()
    assert order == [True, False, True, False]


async def test_a_client_that_leaves_in_between_is_not_answered_and_its_place_is_free_again(made: ServerApp) -> None:
    leaving = Client()
    task = asyncio.ensure_future(made.app(leaving.scope, leaving.receive, leaving.send))
    async with asyncio.timeout(60):
        while not leaving.farewells:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for cancel in tuple(leaving.farewells):
            cancel()
        await task
    assert leaving.sent == []
    assert all(status.running == 0 for status in made.scheduler.status().values())


def test_a_whole_request_with_pictures_to_fetch_is_answered_too(tmp_path: Path) -> None:
    """They are fetched by a group of tasks, and a group stands in one."""
    (tmp_path / "a.png").write_bytes(PNG)
    config = demo(modalities=["text", "image"]) | {"images": {"allow": [f"file://{tmp_path}/"]}}
    picture = {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a.png"}}
    asked = {"model": "m", "messages": [{"role": "user", "content": [picture]}]}
    with serving(config) as served:
        reply = httpx.post(f"{served.url}/v1/chat/completions", json=asked)
    assert reply.json()["choices"][0]["message"]["content"] == "Hello there."
