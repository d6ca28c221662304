"""Scheduler, workers and gateways connected by sockets on one loop: leases, deaths, admin commands, shared store."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

import modelyard_fake as fake
from modelyard.config.load import load_config
from modelyard.core.engine import CacheInfo, Control, EngineInfo, EngineSpec, TextEngine, Tokens
from modelyard.core.errors import Cancelled, Conflict, InvalidRequest, NotFound, RateLimited, Unavailable
from modelyard.core.pool import KeyLimits, LeaseRequest
from modelyard.object_store import SqliteObjectStore
from modelyard.scheduler.scheduler import Scheduler
from modelyard.server.app import compose
from modelyard.store import MemoryStore
from modelyard.telemetry.log import recent_records
from modelyard.workers.definitions import message_spec
from modelyard.workers.messages import (
    VERSION,
    ConnectionRefused,
    EngineLocation,
    Heartbeat,
    JoinAccepted,
    JoinGateway,
    OpenEngine,
    PoolState,
    RegisterWorker,
    ReleaseLease,
    RequestLease,
    StoreOperation,
    decode_for_gateway,
    decode_for_scheduler,
    encode,
)
from modelyard.workers.remote_pool import RemotePool, RemoteStore
from modelyard.workers.scheduler_server import SchedulerServer, run_store_operation
from modelyard.workers.transport import DealerSocket, HeartbeatConfig, PeerDisconnected, RouterSocket
from modelyard.workers.worker import HostedEngine, Worker
from modelyard.workers.worker_pool import WorkerPool, create_worker_engine
from modelyard_fake.engine import FakeTextEngine
from tests.engines.reading import end, ids, read
from tests.engines.reading import until as read_until
from tests.live_server import demo_config
from tests.workers.conftest import Closing
from tests.workers.harness import (
    DEADLINE_S,
    DEFINITIONS,
    LENIENT,
    STRICT,
    connected,
    fake_spec,
    ipc_endpoint,
    prompt,
    running_worker,
    until,
)

HANGING: dict[str, Any] = {"script": [{"when": "on", "steps": [{"text": "so far"}, {"hang": True}]}], "echo": True}
FREQUENT = HeartbeatConfig(interval_s=0.02, worker_misses=1000, client_misses=1000)


def model_spec(name: str = "demo", parallel: int = 2, **options: Any) -> EngineSpec:
    caches = {"main": CacheInfo(4096, parallel)}
    spec = DEFINITIONS.add("fake", EngineSpec(name, fake.Options(**({"token_delay": 0, **HANGING} | options)), caches))
    return replace(spec, identity=f"{name}:{parallel}:{options}", replica_max=3)


class Deployment:
    """A scheduler with its server and workers. `start` after `kill` replaces it by a new one without state."""

    def __init__(self, folder: Path, workers: list[Worker], limits: dict[str, KeyLimits] | None = None) -> None:
        self.endpoint, self._folder, self.workers, self._limits = ipc_endpoint(), folder, workers, limits
        self.reloads = 0

    async def start(self, **options: Any) -> None:
        self.worker_pool = WorkerPool(self._folder, heartbeat=FREQUENT, launch=False)
        self.scheduler = Scheduler(
            create=lambda spec, _: create_worker_engine(self.worker_pool, spec), limits=self._limits
        )
        self.store = MemoryStore(100, 1 << 20, 3600)
        for worker in self.workers:
            engines = [hosted.info() for hosted in worker.engines]
            self.worker_pool.register(worker.name, worker.endpoint, engines, models=("demo",))
        self.scheduler.reconfigure({"demo": model_spec(**options)})
        self.server = SchedulerServer(
            self.endpoint, self.scheduler, self.worker_pool, self.store, self._reload, heartbeat=FREQUENT
        )

    async def _reload(self) -> None:
        self.reloads += 1

    async def kill(self) -> None:
        """Like kill -9: no peer gets a goodbye, and the engines stay open."""
        await self.server._socket.close()
        self.server._timer.cancel()
        for task in list(self.server._tasks):
            task.cancel()
        replicas = [one for model in self.scheduler._models.values() for one in model.replicas]
        for replica in replicas:
            replica._life.cancel()  # it must not reopen engines
        await asyncio.gather(*(replica._life for replica in replicas), return_exceptions=True)
        for replica in replicas:
            replica.engine._worker.session.end(Unavailable("dead"))
            await replica.engine._worker.session._socket.close()

    async def close(self) -> None:
        await self.server.close()
        await self.scheduler.close()


@asynccontextmanager
async def deployed(folder: Path, workers: int = 1, **more: Any) -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(running_worker(heartbeat=FREQUENT)) for _ in range(workers)]
        for number, worker in enumerate(started):
            worker.name = f"w{number}"
        deployment = Deployment(folder, started, more.pop("limits", None))
        await deployment.start(**more)
        await deployment.scheduler.load("demo")
        stack.push_async_callback(deployment.close)
        yield deployment


@asynccontextmanager
async def gateway(deployment: Deployment, name: str = "g", **more: Any) -> AsyncIterator[RemotePool]:
    pool = RemotePool(deployment.endpoint, name, heartbeat=FREQUENT, **more)
    try:
        await pool.wait_ready(DEADLINE_S)
        await until(lambda: pool.is_connected)
        yield pool
    finally:
        await pool.close()


def lease_request(**fields: Any) -> LeaseRequest:
    return LeaseRequest(**({"model": "demo", "cache": "main"} | fields))


async def lease_from(pool: RemotePool, **fields: Any) -> Any:
    return await asyncio.wait_for(pool.request(lease_request(**fields)).lease(), DEADLINE_S)


async def test_a_lease_is_granted_and_its_tokens_come_from_the_worker(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        lease = await lease_from(pool)
        assert isinstance(lease.engine, TextEngine)
        assert lease.engine.info.caches["main"].parallel == 2
        assert end(await read(lease.engine.generate(prompt("Hello.")))).reason == "stop"
        await until(lambda: pool.status()["demo"].running == 1)
        lease.release()
        lease.release()
        await until(lambda: pool.status()["demo"].running == 0)
        assert pool.engine("demo") is not None


async def test_two_gateways_share_the_slots_of_one_engine(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment, "a") as one, gateway(deployment, "b") as two:
        first, second = await lease_from(one), await lease_from(two)
        waiting = one.request(lease_request())
        await until(lambda: waiting.position == 1)
        assert not waiting.granted
        second.release()
        third = await asyncio.wait_for(waiting.lease(), DEADLINE_S)
        assert third.waited > 0
        for lease in (first, third):
            lease.release()
        await until(lambda: deployment.scheduler.status()["demo"].running == 0)


async def test_the_limits_of_a_key_cover_all_gateways(tmp_path: Path) -> None:
    async with (
        deployed(tmp_path, limits={"k": KeyLimits(max_concurrent=1)}) as deployment,
        gateway(deployment, "a") as one,
        gateway(deployment, "b") as two,
    ):
        lease = await lease_from(one, key="k")
        with pytest.raises(RateLimited):
            await lease_from(two, key="k")
        lease.release()
        await until(lambda: deployment.scheduler.status()["demo"].running == 0)
        (await lease_from(two, key="k")).release()


async def test_limits_of_a_created_key_reach_the_scheduler_and_the_one_that_replaces_it(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment, "a") as one, gateway(deployment, "b") as two:
        one.set_limits({"new": KeyLimits(max_concurrent=1)})
        lease = await lease_from(one, key="new")
        with pytest.raises(RateLimited):
            await lease_from(two, key="new")
        lease.release()
        await deployment.kill()
        await deployment.start()
        await until(lambda: "new" in deployment.scheduler._rate_limiters)
        one.set_limits({})
        await until(lambda: not deployment.scheduler._rate_limiters)


async def test_a_gateway_gets_the_errors_of_the_scheduler(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        with pytest.raises(NotFound):
            await lease_from(pool, model="unknown")
        await pool.unload("demo")
        with pytest.raises(Conflict):
            await lease_from(pool)


async def test_a_gateway_reads_the_log_of_the_scheduler(tmp_path: Path) -> None:
    line = {"name": "modelyard.scheduler", "levelno": logging.ERROR, "levelname": "ERROR", "msg": "no room for demo"}
    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        before = time.time() - 1
        recent_records.add(logging.makeLogRecord(line))
        lines = await pool.log_lines(before, logging.WARNING, "", 10)
        assert "no room for demo" in [found["message"] for found in lines]
        assert await pool.log_lines(before, logging.CRITICAL, "", 10) == []


async def test_a_cancelled_request_leaves_the_queue(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        held = [await lease_from(pool) for _ in range(2)]
        waiting = pool.request(lease_request())
        await until(lambda: deployment.scheduler.status()["demo"].waiting == 1)
        waiting.cancel()
        with pytest.raises(Cancelled):
            await waiting.lease()
        await until(lambda: deployment.scheduler.status()["demo"].waiting == 0)
        quick = pool.request(lease_request())
        quick.cancel()  # before the scheduler has replied
        for lease in held:
            lease.release()
        await until(lambda: deployment.scheduler.status()["demo"].running == 0)


async def test_the_leases_of_a_dead_gateway_are_released_when_its_requests_have_ended(
    tmp_path: Path, closing: Closing
) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment, "other") as other:
        dead = closing(RemotePool(deployment.endpoint, "dead", heartbeat=FREQUENT))
        await until(lambda: dead.is_connected)
        for _ in range(2):
            lease = await lease_from(dead)
            await read_until(lease.engine.generate(prompt("Go on.")), Tokens)
        waiting = other.request(lease_request())
        await until(lambda: waiting.position == 1)
        dead._timer.cancel()
        await dead._socket.close()  # its links break, as for a killed process
        lease = await asyncio.wait_for(waiting.lease(), DEADLINE_S)
        assert sum(hosted.running for hosted in deployment.workers[0].engines) == 0
        lease.release()
        await dead.close()


async def test_running_requests_survive_a_restart_of_the_scheduler(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        lease = await lease_from(pool)
        job = lease.engine.generate(prompt("Go on."))
        await read_until(job, Tokens)
        (engine,) = (hosted.id for hosted in deployment.workers[0].engines)
        await deployment.kill()
        await until(lambda: not pool.is_connected)
        waiting = pool.request(lease_request())
        await deployment.start()
        deployment.scheduler.preload("demo")
        second = await asyncio.wait_for(waiting.lease(), DEADLINE_S)
        assert [hosted.id for hosted in deployment.workers[0].engines] == [engine], "it was loaded anew"
        await until(lambda: deployment.scheduler.status()["demo"].running == 2)
        third = pool.request(lease_request())
        await until(lambda: third.position == 1)  # the old lease counts
        job.cancel()
        assert end(await read(job)).reason == "cancelled"
        lease.release()
        (await asyncio.wait_for(third.lease(), DEADLINE_S)).release()
        second.release()


async def test_calls_wait_for_a_scheduler_that_is_restarted(tmp_path: Path) -> None:
    """As requests do: one that the old scheduler did not answer, and one that begins while there is none."""
    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        deployment.server._handlers[StoreOperation] = lambda *_: None
        unanswered = asyncio.create_task(RemoteStore(pool, "responses").put("s", "k", b"kept"))
        await until(lambda: len(pool._calls) == 1)
        await deployment.kill()
        await until(lambda: not pool.is_connected)
        begun = asyncio.create_task(pool.refresh())
        await deployment.start()
        await asyncio.wait_for(asyncio.gather(unanswered, begun), DEADLINE_S)
        assert await RemoteStore(pool, "responses").get("s", "k") == b"kept"
        assert set(pool.snapshot().models) == {"demo"}


async def test_a_gateway_joins_again_if_its_first_message_was_lost(closing: Closing) -> None:
    """ZeroMQ reconnects by itself but does not send lost messages again."""
    joins: list[bytes] = []
    scheduler = closing(RouterSocket(ipc_endpoint(), lambda _, data: joins.append(data)))
    pool = closing(RemotePool(scheduler.endpoint, "g", heartbeat=STRICT))
    await until(lambda: sum(isinstance(decode_for_scheduler(data), JoinGateway) for data in joins) > 1)
    assert not pool.is_connected
    await pool.close()
    await scheduler.close()


async def test_requests_are_refused_if_the_scheduler_does_not_come_back(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment, timeout_s=0.1) as pool:
        await deployment.kill()
        await until(lambda: not pool.is_connected)
        with pytest.raises(Unavailable, match="unreachable"):
            await lease_from(pool)
        with pytest.raises(Unavailable):
            await RemoteStore(pool, "responses").get("s", "k")
        with pytest.raises(Unavailable) as caught:
            pool.request(lease_request())
        assert caught.value.retry_after == 2.0


async def test_requests_wait_for_a_lost_scheduler_only_for_the_time_of_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long they may wait for a lost engine."""
    async with deployed(tmp_path) as deployment, gateway(deployment, timeout_s=3600) as pool:
        await deployment.kill()
        await until(lambda: not pool.is_connected)
        waiting = pool.request(lease_request())
        calling = asyncio.create_task(pool.refresh())
        monkeypatch.setattr("modelyard.workers.remote_pool._RECONNECT_S", 0.0)
        pool._heartbeat = STRICT
        with pytest.raises(Unavailable, match="unreachable"):
            await asyncio.wait_for(waiting.lease(), DEADLINE_S)
        with pytest.raises(Unavailable, match="unreachable"):
            await asyncio.wait_for(calling, DEADLINE_S)
        with pytest.raises(Unavailable, match="unreachable"):
            pool.request(lease_request())


# --- pauses -----------------------------------------------------------------------------------------------------------


async def test_a_late_join_of_an_old_connection_does_not_replace_the_live_one(tmp_path: Path, closing: Closing) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        live, received = deployment.server._gateways(), []
        old = closing(DealerSocket(deployment.endpoint, received.append, lambda _: None))
        old.send(encode(JoinGateway(VERSION, "g", connection=pool._connection - 1)))
        await until(lambda: len(deployment.server._dropped) == 1)
        assert deployment.server._gateways() == live
        (await lease_from(pool)).release()
        assert pool._connection == 1
        assert received == []
        await old.close()


async def test_a_newer_connection_replaces_the_old_one_and_what_the_old_one_still_sends_is_ignored(
    tmp_path: Path, closing: Closing
) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        old = pool._socket
        pool._socket = closing(DealerSocket(ipc_endpoint(), lambda _: None, lambda _: None))  # keep the old one open
        pool._reconnect()
        await until(lambda: pool.is_connected)
        old.send(encode(Heartbeat(7)))
        (await lease_from(pool)).release()
        assert len(deployment.server._gateways()) == 1
        assert deployment.server.faults == 0
        assert pool._connection == 2
        await old.close()


async def test_a_refused_gateway_joins_again_and_keeps_the_leases_of_its_running_requests(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        lease = await lease_from(pool)
        job = lease.engine.generate(prompt("Go on."))
        await read_until(job, Tokens)
        (peer,) = deployment.server._gateways()
        deployment.server._send(peer, ConnectionRefused("a mistake"))
        await until(lambda: not pool.is_connected)
        (await lease_from(pool)).release()
        assert deployment.scheduler.status()["demo"].running >= 1
        job.cancel()
        assert end(await read(job)).reason == "cancelled"
        lease.release()
        await until(lambda: deployment.scheduler.status()["demo"].running == 0)


async def test_a_refused_gateway_waits_for_the_answer_to_its_next_attempt(closing: Closing) -> None:
    """A busy scheduler may need longer for it than a heartbeat."""
    joins: list[bytes] = []
    scheduler = closing(RouterSocket(ipc_endpoint(), lambda peer, _: joins.append(peer)))
    pool = closing(RemotePool(scheduler.endpoint, "g", heartbeat=FREQUENT))
    await until(lambda: len(joins) == 1)
    scheduler.send(joins[0], encode(ConnectionRefused("a mistake")))
    await until(lambda: len(joins) == 2)
    ticks = pool._monitor.number
    await until(lambda: pool._monitor.number > ticks + 10)
    assert len(joins) == 2
    scheduler.send(joins[1], encode(JoinAccepted(VERSION)))
    await until(lambda: pool.is_connected)
    await pool.close()
    await scheduler.close()


async def test_running_requests_survive_a_broken_connection_to_the_scheduler(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        lease = await lease_from(pool)
        job = lease.engine.generate(prompt("Go on."))
        await read_until(job, Tokens)
        (peer,) = deployment.server._gateways()
        deployment.server._drop(peer)  # its connection has broken, and it has not connected again yet
        (releasing,) = (each for each in deployment.server._tasks if "rejoined" in repr(each.get_coro()))
        pool._reconnect()
        (await lease_from(pool)).release()
        await asyncio.wait_for(releasing, DEADLINE_S)
        assert sum(hosted.running for hosted in deployment.workers[0].engines) == 1
        assert deployment.scheduler.status()["demo"].running >= 1
        job.cancel()
        assert end(await read(job)).reason == "cancelled"
        lease.release()
        await until(lambda: deployment.scheduler.status()["demo"].running == 0)


async def test_a_worker_outlives_a_long_silence_of_its_scheduler(tmp_path: Path) -> None:
    """The scheduler is paused for much longer than a client may be silent."""
    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        worker = deployment.workers[0]
        (session,) = (each._worker.session for each in deployment.scheduler.engines("demo"))
        assert session._timer is not None
        session._timer.cancel()
        (client,) = (each for each in worker._peers.values() if each.name == deployment.worker_pool.name)
        client.heartbeat.missed = 10_000
        await until(lambda: client.heartbeat.missed > 10_003)
        session._tick()
        await until(lambda: client.heartbeat.missed < 100)
        (await lease_from(pool)).release()
        assert not session.is_lost


async def test_a_refused_worker_registers_again(
    tmp_path: Path, closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelyard.workers.worker_process._REFUSED_S", 0.01)
    from modelyard.workers.worker_process import _register

    made = Deployment(tmp_path, [])
    await made.start()
    closing(made)
    async with running_worker(heartbeat=LENIENT) as worker:
        offering = asyncio.create_task(_register(worker, DEFINITIONS, made.endpoint, None, FREQUENT))
        try:
            await until(lambda: made.worker_pool._registered != {})
            (peer,) = made.server._peers.values()
            made.server._refuse(peer, "a mistake")
            assert made.worker_pool._registered == {}
            await until(lambda: made.worker_pool._registered != {})
        finally:
            offering.cancel()
            await asyncio.gather(offering, return_exceptions=True)


async def test_a_lost_engine_is_not_granted_again_before_the_scheduler_notices(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        lease = await lease_from(pool)
        job = lease.engine.generate(prompt("Go on."))
        await read_until(job, Tokens)
        deployment.workers[0].engines[0].engine.die(Unavailable("out of memory"))
        assert isinstance(end(await read(job)).error, Unavailable)
        lease.release()
        again = await lease_from(pool, is_retry=True)
        assert again.engine is not lease.engine
        assert end(await read(again.engine.generate(prompt("Hello.")))).reason == "stop"
        again.release()


async def test_a_gateway_that_lost_only_its_link_gets_the_same_engine_after_a_liveness_check(
    tmp_path: Path,
) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        lease = await lease_from(pool)
        (session,) = pool._sessions.values()
        session.end(Unavailable("a cable was pulled"))
        lease.release()
        again = await lease_from(pool, is_retry=True)
        assert again.engine is not lease.engine
        assert again.engine.id == lease.engine.id
        assert end(await read(again.engine.generate(prompt("Hello.")))).reason == "stop"
        again.release()


async def test_only_a_reply_to_a_later_heartbeat_proves_liveness(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment:
        (engine,) = deployment.server._engines()
        session = engine._worker.session  # type: ignore[union-attr]
        lives = engine.liveness_check()
        session._on_heartbeat(Heartbeat(0))  # the worker's own heartbeat
        session._on_heartbeat(Heartbeat(session.heartbeats_sent))  # a reply that was in flight
        assert not lives()
        await until(lives)


async def test_a_lost_worker_is_not_used_until_it_registers_again(tmp_path: Path) -> None:
    async with deployed(tmp_path, workers=2) as deployment, gateway(deployment) as pool:
        lease = await lease_from(pool)
        (engine,) = deployment.server._engines()
        (busy,) = (worker for worker in deployment.workers if worker.engines)
        (other,) = (worker for worker in deployment.workers if not worker.engines)
        engine._worker.session.end(Unavailable("it has been silent"))  # type: ignore[union-attr]
        await until(lambda: bool(other.engines))
        assert busy.name not in deployment.worker_pool._registered
        assert deployment.worker_pool.register(busy.name, busy.endpoint, [])
        lease.release()


async def test_a_draining_worker_finishes_its_requests_and_its_model_moves_to_another_worker(tmp_path: Path) -> None:
    long_reply: dict[str, Any] = {"script": [{"steps": [{"tokens": 1500}]}], "token_delay": 0.0005}
    async with deployed(tmp_path, workers=2, **long_reply) as deployment, gateway(deployment) as pool:
        lease = await lease_from(pool)
        job = lease.engine.generate(prompt())
        chunks = await read_until(job, Tokens)
        (busy,) = (worker for worker in deployment.workers if worker.engines)
        deployment.worker_pool.unregister(busy.name)
        draining = asyncio.create_task(busy.drain(DEADLINE_S))
        await until(lambda: deployment.scheduler.engines("demo") == ())
        second = await lease_from(pool)
        assert second.engine is not lease.engine
        second.release()
        chunks += await read(job)
        assert len(ids(chunks)) == 1500
        lease.release()
        assert await draining


async def test_a_closing_gateway_opens_no_sessions_with_new_workers(closing: Closing) -> None:
    def engine(worker: Worker, id: str) -> EngineLocation:
        return EngineLocation("demo", worker.endpoint, id, "text", EngineInfo("fake", {}), False)

    peers: list[bytes] = []
    scheduler = closing(RouterSocket(ipc_endpoint(), lambda peer, _: peers.append(peer)))
    async with running_worker() as old, running_worker() as new:
        pool = closing(RemotePool(scheduler.endpoint, "g", heartbeat=LENIENT))
        await until(lambda: bool(peers))
        scheduler.send(peers[0], encode(PoolState({}, (engine(old, "a"),))))
        await until(lambda: bool(pool._sessions))
        (session,) = pool._sessions.values()
        close = session.close

        async def slowly() -> None:
            with suppress(PeerDisconnected):
                scheduler.send(peers[0], encode(PoolState({}, (engine(old, "a"), engine(new, "b")))))
            for _ in range(20):
                await asyncio.sleep(0.005)  # long enough for a message to be handled
            await close()

        session.close = slowly  # type: ignore[method-assign]
        await pool.close()
        assert [one.endpoint for one in pool._sessions.values()] == [old.endpoint]
    await scheduler.close()


async def test_admin_commands_reach_the_scheduler(tmp_path: Path) -> None:
    async with deployed(tmp_path, workers=2) as deployment, gateway(deployment) as pool:
        changes = pool.subscribe()
        await pool.scale("demo", 2)
        assert len(pool.snapshot().models["demo"].replicas) == 2
        assert len({hosted.id for worker in deployment.workers for hosted in worker.engines}) == 2
        await pool.drain("demo")
        assert (await asyncio.wait_for(anext(changes), DEADLINE_S)).model == "demo"
        with pytest.raises(Unavailable):
            await lease_from(pool)
        await pool.load("demo")
        with pytest.raises(NotFound):
            pool.load("unknown")
        await pool.reload()
        assert deployment.reloads == 1
        await pool.unload("demo", force=True)
        assert pool.status()["demo"].state == "stopped"
        assert all(worker.engines == () for worker in deployment.workers)


async def test_other_gateways_are_notified_of_a_reload(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment, "a") as one, gateway(deployment, "b") as two:
        received: list[int] = []
        one.on_config_change = two.on_config_change = received.append
        await one.reload()
        await until(lambda: two.state.config_version == 1 and one.state.config_version == 1)
        assert received == [1]


async def test_a_request_of_another_gateway_is_cancelled_by_its_trace(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment, "a") as one, gateway(deployment, "b") as two:
        lease = await lease_from(one, trace="t")
        why: list[Any] = []
        lease.on_revoke(why.append)
        await two.refresh()
        assert [request.trace for request in two.requests()] == ["t"]
        assert two.cancel("unknown") == 0
        assert two.cancel("t") == 1
        await until(lambda: bool(why))
        assert isinstance(why[0], Cancelled)
        lease.release()


async def test_gateways_share_the_store_by_scope(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment, "a") as one, gateway(deployment, "b") as two:
        here, other = RemoteStore(one, "responses"), RemoteStore(two, "responses")
        await here.put("key", "r\udc80", b"\0value")
        assert await other.get("key", "r\udc80") == b"\0value"
        assert await other.get("other", "r\udc80") is None
        assert await other.delete("key", "r\udc80")
        assert not await here.delete("key", "r\udc80")


async def test_gateways_share_conversations_files_and_batches(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment, "a") as one, gateway(deployment, "b") as two:
        here, other = RemoteStore(one, "objects"), RemoteStore(two, "objects")
        with pytest.raises(Unavailable, match="keeps no"):
            await here.get("files/ada", "f")
        deployment.server._objects = objects = SqliteObjectStore(tmp_path / "objects.sqlite", 100, 1 << 20)
        assert await here.page("files/ada") == []
        for key in ("f1", "f2\udc80", "f3"):
            await here.put("files/ada", key, b"\0" + key[:2].encode(), 60)
        assert await other.page("files/ada", after="f1", limit=1) == [("f2\udc80", b"\0f2")]
        assert await other.page("files/ada", newest_first=True, values=False, limit=1) == [("f3", b"")]
        won = await asyncio.gather(here.swap("open", "b", None, b"a"), other.swap("open", "b", None, b"b"))
        assert sorted(won) == [False, True]
        assert await other.swap("files/ada", "f1", b"\0f1", b"new")
        assert await here.get("files/ada", "f1") == b"new"
        assert await other.delete("files/ada", "f1")
        assert not await here.delete("files/ada", "f1")
        with pytest.raises(NotFound):
            await here.page("files/ada", after="f1")
        await objects.close()


async def test_engine_calls_need_no_lease(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        (engine,) = pool.engines("demo")
        await engine.control(Control("evict"))
        assert pool.engines("unknown") == ()


async def test_a_session_stays_on_its_replica(tmp_path: Path) -> None:
    async with deployed(tmp_path, workers=2) as deployment, gateway(deployment) as pool:
        await pool.scale("demo", 2)
        await until(lambda: pool.state.replicas["demo"] == 2)
        first = await lease_from(pool, session="s", prompt=list(range(100)))
        name = first.engine.id
        first.release()
        for _ in range(3):
            again = await lease_from(pool, session="s", prompt=list(range(100)))
            assert again.engine.id == name
            again.release()


# --- protocol violations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        [b""],
        [b"\xc1"],
        [os.urandom(40)],
        [encode(Heartbeat(1))],
        [encode(ReleaseLease(1))],
        [encode(JoinGateway(VERSION + 1, "x"))],
        [encode(RegisterWorker(VERSION + 1, "w", "ipc:///x"))],
        [encode(JoinGateway(VERSION, "x")), encode(JoinGateway(VERSION, "x"))],
        [
            encode(JoinGateway(VERSION, "x")),
            encode(RequestLease(1, {"model": "demo", "cache": "main", "prompt": ["x"]})),
        ],
        [
            encode(JoinGateway(VERSION, "x")),
            encode(RequestLease(1, LeaseRequest(model="demo", cache="main"))),
            encode(RequestLease(1, LeaseRequest(model="demo", cache="main"))),
        ],
    ],
)
async def test_a_peer_that_violates_the_protocol_is_refused_and_counted(
    tmp_path: Path, words: list[bytes], closing: Closing
) -> None:
    from modelyard.workers.transport import DealerSocket

    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        received: list[Any] = []
        peer = closing(
            DealerSocket(deployment.endpoint, lambda data: received.append(decode_for_gateway(data)), lambda _: None)
        )
        for word in words:
            peer.send(word)
        await until(lambda: any(isinstance(message, ConnectionRefused) for message in received))
        assert deployment.server.faults == 1
        (await lease_from(pool)).release()
        await until(lambda: deployment.scheduler.status()["demo"].running == 0)
        await peer.close()


async def test_a_registered_worker_is_used_and_removed_when_it_leaves(tmp_path: Path, closing: Closing) -> None:
    made = Deployment(tmp_path, [])
    await made.start()
    closing(made)
    async with running_worker(heartbeat=LENIENT) as worker, gateway(made) as pool:
        from modelyard.workers.worker_process import _register

        loading = made.scheduler.load("demo")
        offering = asyncio.create_task(_register(worker, DEFINITIONS, made.endpoint, None, FREQUENT))
        try:
            await asyncio.wait_for(loading, DEADLINE_S)
            (await lease_from(pool)).release()
        finally:
            offering.cancel()
            await asyncio.gather(offering, return_exceptions=True)
        await until(lambda: made.worker_pool._registered == {})


# --- no leaks ---------------------------------------------------------------------------------------------------------


class SlowOpening:
    """The fake engine opens when `go` is set; `closed` counts closed engines."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.go, self.closed = asyncio.Event(), asyncio.Event(), 0
        open_, close = FakeTextEngine.open, FakeTextEngine.close

        async def opening(engine: Any, progress: Any) -> None:
            self.begun.set()
            await self.go.wait()
            await open_(engine, progress)

        async def closing(engine: Any) -> None:
            self.closed += 1
            await close(engine)

        patch.setattr(FakeTextEngine, "open", opening)
        patch.setattr(FakeTextEngine, "close", closing)


@pytest.fixture
async def slow_opening(monkeypatch: pytest.MonkeyPatch) -> SlowOpening:
    return SlowOpening(monkeypatch)


async def test_an_aborted_load_leaves_no_engine_in_a_registered_worker(
    slow_opening: SlowOpening, tmp_path: Path
) -> None:
    async with running_worker(heartbeat=FREQUENT) as worker:
        deployment = Deployment(tmp_path, [worker])
        await deployment.start()
        try:
            loading = deployment.scheduler.load("demo")
            await asyncio.wait_for(slow_opening.begun.wait(), DEADLINE_S)
            await asyncio.wait_for(deployment.scheduler.unload("demo", True), DEADLINE_S)
            await asyncio.gather(loading, return_exceptions=True)
            await until(lambda: slow_opening.closed > 0)
            assert worker._engines == {}
        finally:
            await deployment.close()


async def test_a_worker_that_closes_while_an_engine_opens_closes_it_and_opens_no_other(
    slow_opening: SlowOpening, closing: Closing
) -> None:
    worker = closing(Worker(ipc_endpoint(), DEFINITIONS, heartbeat=LENIENT))
    try:
        async with connected(worker) as session:
            first = asyncio.create_task(session.open(OpenEngine("a", message_spec(fake_spec())), lambda *_: None))
            await asyncio.wait_for(slow_opening.begun.wait(), DEADLINE_S)
            closing = asyncio.create_task(worker.close())
            second = asyncio.create_task(session.open(OpenEngine("b", message_spec(fake_spec())), lambda *_: None))
            await asyncio.wait_for(closing, DEADLINE_S)
            session.end(Unavailable("it has gone"))
            for opening in (first, second):
                with pytest.raises(Unavailable):
                    await opening
        assert slow_opening.closed == 1
        assert worker._engines == {}
        assert worker._tasks == set()
    finally:
        await worker.close()


async def test_closing_a_pool_twice_waits_for_the_same_close(tmp_path: Path, closing: Closing) -> None:
    async with deployed(tmp_path) as deployment:
        pool = closing(RemotePool(deployment.endpoint, "g", heartbeat=FREQUENT))
        await until(lambda: pool.engine("demo") is not None)
        first_close = asyncio.create_task(pool.close())
        await asyncio.sleep(0)
        first_close.cancel()
        await asyncio.gather(first_close, return_exceptions=True)
        await asyncio.wait_for(pool.close(), DEADLINE_S)
        assert all(session.is_lost for session in pool._sessions.values())
        assert all(session._socket._socket.closed for session in pool._sessions.values())


async def test_a_closing_server_handles_no_further_messages(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        held = [await lease_from(pool) for _ in range(2)]
        waiting = [pool.request(lease_request()) for _ in range(3)]
        await until(lambda: deployment.scheduler.status()["demo"].waiting == 3)
        closing = asyncio.create_task(deployment.server.close())
        waiting += [pool.request(lease_request()) for _ in range(3)]  # in flight while it closes
        await asyncio.wait_for(closing, DEADLINE_S)
        assert deployment.server._tasks == set()
        for place in (*held, *waiting):
            place.cancel()


async def test_a_worker_that_did_not_answer_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closing: Closing
) -> None:
    monkeypatch.setattr("modelyard.workers.worker_pool._CONNECT_S", 0.05)
    monkeypatch.setattr("modelyard.workers.worker_pool._RETRY_S", 0.05)
    worker_pool, endpoint, tries = WorkerPool(tmp_path, heartbeat=LENIENT, launch=False), ipc_endpoint(), []
    deaf = closing(RouterSocket(endpoint, lambda peer, _: tries.append(peer)))
    worker_pool.register("w", endpoint, [], models=("demo",))
    acquiring = asyncio.create_task(worker_pool.acquire(replace(fake_spec(), identity="x")))
    try:
        await until(lambda: len(tries) > 1)
    finally:
        await deaf.close()
    async with running_worker(endpoint):
        worker = await asyncio.wait_for(acquiring, DEADLINE_S)
        assert worker.session.welcome is not None
        await worker.close()


async def test_an_invalid_address_is_reported_and_leaves_no_socket_open() -> None:
    with pytest.raises(Unavailable, match="cannot connect to tcp://127"):
        DealerSocket("tcp://127.0.0.1:*", lambda _: None, lambda _: None)


async def test_a_broken_link_is_replaced_with_the_next_lease(tmp_path: Path) -> None:
    """The scheduler says that the worker is alive: only our link to it broke."""
    async with deployed(tmp_path) as deployment, gateway(deployment) as pool:
        (await lease_from(pool)).release()
        (session,) = pool._sessions.values()
        session.end(Unavailable("the link broke"))
        lease = await lease_from(pool, is_retry=True)
        assert end(await asyncio.wait_for(read(lease.engine.generate(prompt("Hello."))), DEADLINE_S)).reason == "stop"
        lease.release()


# --- deduplication across gateways ------------------------------------------------------------------------------------

CHAT = "/v1/chat/completions"
HANGING_REPLY = [{"steps": [{"text": "so far"}, {"hang": True}]}]


@asynccontextmanager
async def gateways(folder: Path) -> AsyncIterator[tuple[Deployment, list[httpx.AsyncClient]]]:
    """Two complete gateways with one scheduler and one worker."""
    loaded = load_config(env={}, overrides=demo_config(HANGING_REPLY))
    async with deployed(folder, parallel=4, script=HANGING_REPLY) as deployment, AsyncExitStack() as stack:
        clients = []
        for name in ("a", "b"):
            pool: RemotePool = await stack.enter_async_context(gateway(deployment, name))
            await until(lambda pool=pool: pool.engine("demo") is not None)  # type: ignore[misc]
            made = compose(loaded.config, {}, pool=pool)
            transport = httpx.ASGITransport(made.app)
            clients.append(
                await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
            )
            stack.push_async_callback(made.gateway.close)
        yield deployment, clients


def body(**more: Any) -> dict[str, Any]:
    return {"model": "x", "messages": [{"role": "user", "content": "Hi."}], "temperature": 0} | more


@pytest.mark.parametrize(
    ("second", "runs"),
    [
        ({}, 1),
        ({"stream": True}, 1),
        ({"max_tokens": 7}, 2),
        ({"temperature": 0.5, "seed": 3}, 2),
    ],
    ids=["the same", "the same, streamed", "another length", "another sampling"],
)
async def test_the_same_request_at_two_gateways_is_one_run(tmp_path: Path, second: dict[str, Any], runs: int) -> None:
    async with gateways(tmp_path) as (deployment, clients):
        (worker,) = deployment.workers
        (hosted,) = worker.engines
        asked = [
            asyncio.create_task(client.post(CHAT, json=body(**more)))
            for client, more in zip(clients, ({}, second), strict=True)
        ]
        try:
            await until(lambda: hosted.running == 2)
            await until(lambda: _running(hosted) == runs)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: (hosted.running, _running(hosted)) == (0, 0))


def _running(hosted: HostedEngine) -> int:
    assert hosted.engine is not None
    return hosted.engine.stats().running


async def test_a_key_of_the_store_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        await run_store_operation(MemoryStore(1, 100, 10), StoreOperation(1, "responses", "get", b"scope", b"\xff"))
    with pytest.raises(InvalidRequest, match="no pages"):
        await run_store_operation(MemoryStore(1, 100, 10), StoreOperation(1, "responses", "page", b"scope", b""))
