"""A worker and its clients on one loop."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from typing import Any

import pytest

import modelyard_fake as fake
from modelyard.core.engine import (
    CacheInfo,
    Control,
    Embeddings,
    End,
    EngineSpec,
    ForwardingEngine,
    Prompt,
    Ranking,
    TokenRun,
    Tokens,
)
from modelyard.core.errors import Conflict, InvalidRequest, ModelyardError, NotFound, Unavailable, Unsupported
from modelyard.core.events import Failed, collect_reply
from modelyard.core.request import EmbeddingRequest, Request, RerankRequest, Text
from modelyard.core.request import Message as Turn
from modelyard.engines import openai_remote
from modelyard.telemetry.log import TextFormatter
from modelyard.telemetry.request_capture import MemoryCaptureSink, current_capture
from modelyard.workers.client import RemoteChatEngine, WorkerSession, remote_engine
from modelyard.workers.definitions import message_spec
from modelyard.workers.messages import (
    VERSION,
    AbortRequest,
    AddRequest,
    ConnectionRefused,
    DropClient,
    EmbedTokens,
    Goodbye,
    Heartbeat,
    Hello,
    LogLine,
    OpenEngine,
    PauseRequest,
    ResumeRequest,
    UpdateBatch,
    Welcome,
    WorkerReply,
    encode,
)
from modelyard.workers.transport import generate_keys
from modelyard.workers.worker import LogForwarder, Worker, WorkerRequest
from modelyard_fake.engine import FakeChatEngine
from tests.engines.fake_upstream import Answer, chat_stream, error_answer, fake_upstream
from tests.engines.reading import end, ids, read
from tests.engines.reading import until as read_until
from tests.workers.conftest import Closing
from tests.workers.harness import (
    DEADLINE_S,
    DEFINITIONS,
    HANGING,
    LENIENT,
    STRICT,
    RawPeer,
    connected,
    fake_spec,
    open_fake,
    prompt,
    running_worker,
    until,
)

LONG: dict[str, Any] = {"script": [{"steps": [{"tokens": 1000}]}], "token_delay": 0.0001}


async def test_streams_of_two_clients_never_mix() -> None:
    async with running_worker() as worker, connected(worker, "a") as one, connected(worker, "b") as two:
        engine = await open_fake(one, echo=True, token_delay=0.0001)
        same = await open_fake(two)
        texts = [f"This is the number {i}, and it has its own words: {i * 7919}." for i in range(16)]
        jobs = [(engine if i % 2 else same).generate(prompt(text)) for i, text in enumerate(texts)]
        outputs = await asyncio.gather(*(read(job) for job in jobs))
        alone = [ids(await read(engine.generate(prompt(text)))) for text in texts]
        assert [ids(chunks) for chunks in outputs] == alone
        assert len({tuple(each) for each in alone}) == len(texts)


async def test_an_open_engine_is_reused_by_its_id() -> None:
    async with running_worker() as worker, connected(worker, "a") as one:
        first = await open_fake(one, "e", echo=True)
        async with connected(worker, "b") as two:
            assert two.welcome is not None
            assert [held.engine for held in two.welcome.engines] == ["e"]
            second = await open_fake(two, "e")
            assert ids(await read(second.generate(prompt("Hi.")))) == ids(await read(first.generate(prompt("Hi."))))
        assert len(worker.engines) == 1
        assert not first.lost.done()


async def test_opening_an_invalid_engine_fails_with_the_reason() -> None:
    async with running_worker() as worker, connected(worker) as session:
        DEFINITIONS.add("fake", EngineSpec("m", fake.Options(), {}))
        DEFINITIONS.add("fake", EngineSpec("broken", fake.Options(tokenizer_path="/nowhere"), {}))
        for message, expected in [
            (OpenEngine("e", EngineSpec("nonsense", {}, {})), "nonsense"),
            (OpenEngine("e", EngineSpec("m", {"echo": "maybe"})), "echo"),
            (OpenEngine("e", EngineSpec("m", [1])), "options"),
            (OpenEngine("e", EngineSpec("broken", {}, {"main": CacheInfo(9)})), "nowhere"),
        ]:
            with pytest.raises(ModelyardError, match=expected):
                await session.open(message, lambda *_: None)
        assert worker.engines == ()


async def test_control_embeddings_and_counts_return_results_and_errors() -> None:
    async with running_worker() as worker, connected(worker) as session:
        engine = await open_fake(session, echo=True)
        await read(engine.generate(prompt("Hi.")))
        assert engine.stats().occupied_tokens > 0
        await engine.control(Control("evict"))
        assert engine.stats().occupied_tokens == 0
        with pytest.raises(NotFound, match="no cache was saved"):
            await engine.control(Control("restore", argument="x"))
        embeddings = await engine.embed([[1, 2], [3]])
        assert embeddings.prompt_tokens == 3
        assert embeddings == await engine.embed([[1, 2], [3]])
        chat = await open_fake(session, "c", kind="chat", echo=True)
        request = Request(model="m", messages=(Turn("user", (Text("Good morning."),)),))
        assert await chat.count(request) > 0
        with pytest.raises(Unsupported):
            await session.call(lambda id: EmbedTokens(id, "c", []))
        assert collect_reply(await read(chat.chat(request))).text == "Good morning."


@pytest.mark.parametrize("status", [200, 400])
async def test_what_an_engine_in_another_process_sends_and_receives_is_captured(status: int) -> None:
    given = Answer(body=chat_stream("Hi", " you")) if status == 200 else error_answer(400, message="not that")
    sink = MemoryCaptureSink(1 << 20, enabled=True)
    async with fake_upstream(given) as upstream, running_worker() as worker, connected(worker) as session:
        options = openai_remote.Options(remote_base_url=upstream.url, remote_model="theirs")
        spec = DEFINITIONS.add("openai_remote", EngineSpec("far", options, {"main": CacheInfo(4096)}))
        opened = await session.open(OpenEngine("r", message_spec(spec)), lambda *_: None)
        far, capture = remote_engine(session, opened), sink.start("t")
        assert isinstance(far, RemoteChatEngine)
        assert capture is not None
        token = current_capture.set(capture)
        request = Request(model="far", messages=(Turn("user", (Text("Good morning."),)),))
        generation = far.chat(request)
        current_capture.reset(token)
        await read(generation)
        capture.close()
    found = sink.find("t")
    assert found is not None
    assert "Good morning." in found.prompt
    assert found.output == b"".join(given.body).decode()


async def test_a_forwarding_engine_embeds_and_ranks_through_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, ranking = Embeddings([[0.5, 0.25]], 3), Ranking([(1, 0.5), (0, -1.0)], 7)
    embed, rank = EmbeddingRequest(model="m", inputs=("a",)), RerankRequest(model="m", query="q", documents=("a", "b"))
    received: list[object] = []

    async def embed_inputs(_: object, request: object) -> Embeddings:
        received.append(request)
        return embedding

    async def rerank(_: object, request: object) -> Ranking:
        received.append(request)
        return ranking

    async with running_worker() as worker, connected(worker) as session:
        chat = await open_fake(session, "c", kind="chat", echo=True)
        assert isinstance(chat, ForwardingEngine)
        with pytest.raises(Unsupported, match="neither embeds nor ranks"):
            await chat.rerank(rank)
        monkeypatch.setattr(FakeChatEngine, "embed_inputs", embed_inputs, raising=False)
        monkeypatch.setattr(FakeChatEngine, "rerank", rerank, raising=False)
        assert (await chat.embed_inputs(embed), await chat.rerank(rank)) == (embedding, ranking)
        assert received == [embed, rank]


async def test_a_request_of_the_wrong_kind_or_for_an_unknown_engine_fails() -> None:
    async with running_worker() as worker, connected(worker) as session:
        await open_fake(session, "text")
        chat = await open_fake(session, "chat", kind="chat")
        chat.id = "text"
        (last,) = await read(chat.chat(Request(model="m")))
        assert isinstance(last, Failed)
        assert isinstance(last.error, Conflict)
        chat.id = "gone"
        (last,) = await read(chat.chat(Request(model="m")))
        assert isinstance(last.error, Unavailable)


async def test_invalid_token_ids_fail_only_their_request() -> None:
    async with running_worker() as worker, connected(worker) as session:
        engine = await open_fake(session, echo=True)
        (last,) = await read(engine.generate(Prompt(parts=(TokenRun([-1]),))))
        assert isinstance(last.error, InvalidRequest)
        assert end(await read(engine.generate(prompt()))).reason == "stop"


async def test_the_loss_of_an_engine_is_reported_before_its_requests_end() -> None:
    script = [{"when": "die", "steps": [{"text": "a"}, {"die": "out of memory"}]}, *HANGING["script"]]
    async with running_worker() as worker, connected(worker) as session:
        engine = await open_fake(session, script=script)
        other = engine.generate(prompt("Go on."))
        await read_until(other, Tokens)
        fatal = engine.generate(prompt("Please die."))
        while not isinstance((batch := await anext(other))[-1], End):
            pass
        assert engine.lost.done()
        assert "out of memory" in engine.lost.result().message
        assert isinstance(batch[-1].error, ModelyardError)
        await read(fatal)
        await until(lambda: worker.engines == ())
        again = await open_fake(session, "e", echo=True)
        assert end(await read(again.generate(prompt()))).reason == "stop"


# --- protocol violations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word",
    [b"", b"\xc1", os.urandom(64), encode(Heartbeat(1)), encode(Hello(VERSION + 1, "x")), encode(Goodbye())],
    ids=["empty", "invalid", "random", "heartbeat", "another version", "goodbye"],
)
async def test_a_peer_without_a_valid_hello_is_refused_and_counted(word: bytes, closing: Closing) -> None:
    async with running_worker() as worker:
        peer = closing(RawPeer(worker.endpoint))
        peer.send(word)
        await until(lambda: bool(peer.received))
        assert isinstance(peer.received[0], ConnectionRefused)
        assert worker.faults == 1
        peer.send(Hello(VERSION, "again"))
        async with connected(worker) as session:  # later clients are served
            await open_fake(session)
        assert len(peer.received) == 1
        await peer.close()


async def test_another_protocol_version_is_refused_with_advice(closing: Closing) -> None:
    async with running_worker() as worker:
        peer = closing(RawPeer(worker.endpoint))
        peer.send(Hello(VERSION + 1, "newer"))
        await until(lambda: bool(peer.received))
        assert "run the same Modelyard on both sides" in peer.received[0].reason
        await peer.close()


@pytest.mark.parametrize(
    "word",
    [
        b"\xc1",
        encode(Hello(VERSION, "twice")),
        encode(AddRequest("e", 1, {"parts": [["tokens", [1.5]]]})),  # type: ignore[arg-type]
        encode(AddRequest("e", 7, prompt())),
        encode(EmbedTokens(1, "e", [b"\0"])),  # type: ignore[list-item]
        encode(AddRequest("e", 1, prompt()))[:-1],
    ],
)
async def test_a_client_that_sends_a_malformed_message_loses_only_its_own_requests(
    word: bytes, closing: Closing
) -> None:
    async with running_worker() as worker, connected(worker) as session:
        engine = await open_fake(session, **HANGING)
        mine = engine.generate(prompt())
        await read_until(mine, Tokens)
        attacker = closing(RawPeer(worker.endpoint))
        attacker.send(Hello(VERSION, "attacker"))
        attacker.send(AddRequest("e", 7, prompt()))
        await until(lambda: engine_running(worker) == 2)
        attacker.send(word)
        await until(lambda: engine_running(worker) == 1)
        assert worker.faults == 1
        mine.cancel()
        assert end(await read(mine)).reason == "cancelled"
        await attacker.close()


def engine_running(worker: Worker) -> int:
    return sum(hosted.running for hosted in worker.engines)


async def test_messages_for_unknown_requests_are_ignored(closing: Closing) -> None:
    async with running_worker() as worker:
        peer = closing(RawPeer(worker.endpoint))
        for word in (
            Hello(VERSION, "x"),
            AbortRequest(9),
            PauseRequest(9),
            ResumeRequest(9),
            Heartbeat(1),
            DropClient(3, "unknown"),
        ):
            peer.send(word)
        await until(lambda: any(isinstance(word, WorkerReply) for word in peer.received))
        assert worker.faults == 0
        await peer.close()


async def test_random_messages_never_stop_a_worker(closing: Closing) -> None:
    async with running_worker() as worker, connected(worker) as session:
        engine = await open_fake(session, echo=True)
        good = [
            encode(AddRequest("e", 1, Prompt(parts=(TokenRun([1, 2, 3]),)))),
            encode(OpenEngine("f", EngineSpec("m", {}, {}))),
        ]
        for i in range(60):
            peer = closing(RawPeer(worker.endpoint))
            if i % 2:
                peer.send(Hello(VERSION, "fuzz"))
                await until(lambda s=peer: bool(s.received))
            bent = bytearray(good[i % 2] if i % 3 else os.urandom(50))
            bent[i % len(bent)] ^= 0xFF
            peer.send(bytes(bent))
            await peer.close()
            assert end(await read(engine.generate(prompt("Hi.")))).reason == "stop"


# --- silence ------------------------------------------------------------------------------------------------------


async def test_a_silent_client_is_dropped_with_its_requests(closing: Closing) -> None:
    async with running_worker(heartbeat=STRICT) as worker:
        silent = closing(RawPeer(worker.endpoint))
        silent.send(Hello(VERSION, "silent"))
        silent.send(OpenEngine("e", message_spec(fake_spec(**HANGING))))
        await until(lambda: bool(worker.engines))
        silent.send(AddRequest("e", 1, prompt()))
        await until(lambda: engine_running(worker) == 0 and "0 clients" in repr(worker))
        assert worker.engines != ()  # the model stays
        await silent.close()


async def test_a_dropped_client_is_told_when_it_speaks_again(closing: Closing) -> None:
    async with running_worker(heartbeat=STRICT) as worker:
        silent = closing(RawPeer(worker.endpoint))
        silent.send(Hello(VERSION, "silent"))
        silent.send(OpenEngine("e", message_spec(fake_spec(**HANGING))))
        await until(lambda: bool(worker.engines))
        silent.send(AddRequest("e", 1, prompt()))
        await until(lambda: "0 clients" in repr(worker))
        for _ in range(2):
            silent.send(Heartbeat(1))
        await until(lambda: isinstance(silent.received[-1], ConnectionRefused))
        assert "connect again" in silent.received[-1].reason
        await silent.close()


async def test_a_silent_client_without_requests_stays(closing: Closing) -> None:
    """A scheduler that is paused for long continues its conversation."""
    async with running_worker(heartbeat=STRICT) as worker:
        silent = closing(RawPeer(worker.endpoint))
        silent.send(Hello(VERSION, "scheduler-x"))
        await until(lambda: bool(worker._peers))
        (client,) = worker._peers.values()
        await until(lambda: client.heartbeat.missed > 3 * STRICT.client_misses)
        silent.send(Heartbeat(7))
        await until(lambda: any(isinstance(each, Heartbeat) and each.number == 7 for each in silent.received))
        await silent.close()
        await until(lambda: "0 clients" in repr(worker))  # its connection is gone


async def test_the_requests_of_a_disconnected_client_end() -> None:
    async with running_worker() as worker:
        async with connected(worker) as session:
            engine = await open_fake(session, **HANGING)
            job = engine.generate(prompt())
            await read_until(job, Tokens)
        assert isinstance(end(await read(job)).error, Unavailable)
        await until(lambda: engine_running(worker) == 0)


async def test_a_silent_worker_is_lost_with_all_its_requests(closing: Closing) -> None:
    async with running_worker() as worker:
        session = closing(WorkerSession(worker.endpoint, "client", heartbeat=LENIENT))
        await session.connect()
        engine = await open_fake(session, **HANGING)
        job = engine.generate(prompt())
        await read_until(job, Tokens)
        session._heartbeat, session._monitor = STRICT, type(session._monitor)(STRICT.worker_misses)
        worker._handlers = {**worker._handlers, Heartbeat: lambda *_: None}
        session._timer.cancel()
        session._tick()
        last = end(await asyncio.wait_for(read(job), DEADLINE_S))
        assert isinstance(last.error, Unavailable)
        assert "silent" in last.error.message
        assert engine.lost.result() == last.error
        with pytest.raises(Unavailable):
            await engine.control(Control("evict"))
        assert isinstance(end(await read(engine.generate(prompt()))).error, Unavailable)
        await session.close()


async def test_heartbeats_may_be_missed_while_an_engine_loads(closing: Closing) -> None:
    async with running_worker() as worker:
        session = closing(WorkerSession(worker.endpoint, "client", heartbeat=STRICT))
        await session.connect()
        gate = asyncio.Event()
        worker._handlers = {**worker._handlers, Heartbeat: lambda *_: None, OpenEngine: _late(worker, gate)}
        opening = asyncio.create_task(open_fake(session, echo=True))
        for _ in range(4 * STRICT.worker_misses):
            await asyncio.sleep(STRICT.interval_s)
        assert not session.is_lost
        gate.set()
        await opening
        await session.close()


def _late(worker: Worker, gate: asyncio.Event) -> Any:
    def open_(peer: Any, message: OpenEngine) -> None:
        async def wait() -> None:
            await gate.wait()
            worker._on_open(peer, message)

        worker._spawn(wait())

    return open_


async def test_dropping_a_client_replies_when_its_slots_are_free() -> None:
    async with running_worker() as worker, connected(worker, "dead") as one, connected(worker, "scheduler") as two:
        engine = await open_fake(one, **HANGING)
        await open_fake(two, "e")
        jobs = [engine.generate(prompt(f"{i}")) for i in range(3)]
        for job in jobs:
            await read_until(job, Tokens)
        await two.call(lambda id: DropClient(id, "dead"))
        assert engine_running(worker) == 0


async def test_the_slots_of_a_client_that_is_gone_are_free_when_its_engine_has_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker has noticed the loss before the scheduler asks."""
    async with running_worker() as worker, connected(worker, "dead") as one, connected(worker, "scheduler") as two:
        engine = await open_fake(one, **HANGING)
        await read_until(engine.generate(prompt()), Tokens)
        (client,) = (each for each in worker._peers.values() if each.name == "dead")
        (request,) = client.requests.values()
        monkeypatch.setattr(WorkerRequest, "abort", lambda _: None)  # the engine takes its time
        worker._drop(client)
        asked = asyncio.create_task(two.call(lambda id: DropClient(id, "dead", unless_connected=True)))
        await two.call(lambda id: DropClient(id, "unknown"))
        assert not asked.done()
        monkeypatch.undo()
        request.abort()
        await asyncio.wait_for(asked, DEADLINE_S)
        assert engine_running(worker) == 0


async def test_a_connected_client_is_not_dropped_if_the_scheduler_only_asks() -> None:
    async with running_worker() as worker, connected(worker, "alive"), connected(worker, "scheduler") as two:
        with pytest.raises(Conflict):
            await two.call(lambda id: DropClient(id, "alive", unless_connected=True))
        assert "alive" in worker.clients


# --- slow readers ----------------------------------------------------------------------------------------------------


async def test_a_slow_reader_pauses_only_its_own_stream() -> None:
    async with running_worker() as worker, connected(worker) as session:
        engine = await open_fake(
            session, caches={"main": CacheInfo(200_000, 4)}, script=[{"steps": [{"tokens": 12_000}]}], token_delay=1e-9
        )
        slow = engine.generate(prompt(max_tokens=12_000))
        quick = engine.generate(prompt(max_tokens=3000))
        assert len(ids(await read(quick))) == 3000
        await until(lambda: bool(next(iter(worker._peers.values())).paused))
        held = session._requests[1]
        assert held.is_paused
        waiting = len(held.queue._items)
        quick = engine.generate(prompt(max_tokens=3000))
        assert len(ids(await read(quick))) == 3000
        assert len(held.queue._items) - waiting < 1024, "it continued although its reader did not read"
        chunks = await read(slow)
        assert len(ids(chunks)) == end(chunks).usage.output == 12_000


async def test_a_paused_request_can_be_cancelled() -> None:
    async with running_worker() as worker, connected(worker) as session:
        engine = await open_fake(
            session, caches={"main": CacheInfo(200_000, 4)}, script=[{"steps": [{"tokens": 20_000}]}], token_delay=1e-9
        )
        slow = engine.generate(prompt(max_tokens=20_000))
        await until(lambda: bool(next(iter(worker._peers.values())).paused))
        slow.cancel()
        assert end(await read(slow)).reason == "cancelled"
        assert engine_running(worker) == 0


async def test_a_client_that_does_not_read_pauses_only_its_own_streams() -> None:
    """Its requests are paused and another client continues; when it reads again it gets every token."""
    async with running_worker() as worker, connected(worker, "deaf") as deaf, connected(worker, "other") as other:
        engine = await open_fake(
            deaf, caches={"main": CacheInfo(400_000, 4)}, script=[{"steps": [{"tokens": 12_000}]}], token_delay=1e-9
        )
        same = await open_fake(other, "e")
        peer = next(p for p in worker._peers.values() if p.name == "deaf")
        sent, worker._socket.send = worker._socket.send, lambda who, data: who != peer.identity and sent(who, data)
        job = engine.generate(prompt(max_tokens=12_000))
        await until(lambda: bool(peer.backlog))
        assert len(ids(await read(same.generate(prompt(max_tokens=2000))))) == 2000
        assert len(peer.backlog) < 10
        worker._socket.send = sent
        assert len(ids(await read(job))) == 12_000


async def test_one_loop_iteration_sends_one_batch_per_client(closing: Closing) -> None:
    async with running_worker() as worker:
        peer = closing(RawPeer(worker.endpoint))
        peer.send(Hello(VERSION, "x"))
        peer.send(OpenEngine("e", message_spec(fake_spec(script=[{"steps": [{"text": "Hello there."}]}]))))
        await until(lambda: bool(worker.engines))
        data = [encode(AddRequest("e", i, prompt())) for i in range(8)]
        for each in data:
            worker._on_data(next(iter(worker._peers)), each)
        await until(lambda: any(isinstance(word, UpdateBatch) for word in peer.received))
        (frame,) = [word for word in peer.received if isinstance(word, UpdateBatch)]
        assert {item.request_id for item in frame.updates} == set(range(8))
        assert isinstance(peer.received[0], Welcome)
        await peer.close()


# --- shutdown ---------------------------------------------------------------------------------------------------------


async def test_log_lines_wait_for_a_client_that_wants_them_and_reach_it_once(
    caplog: pytest.LogCaptureFixture, closing: Closing
) -> None:
    """A scheduler has a session for each engine; gateways that only send requests want none."""
    caplog.set_level(logging.INFO)
    async with running_worker() as worker, connected(worker, "gateway"):
        forward = LogForwarder(worker.forward_log)
        fields = {"name": "engine", "levelno": logging.INFO, "levelname": "INFO"}
        forward.handle(logging.makeLogRecord(fields | {"msg": "before %s", "args": ("any",), "request_id": "r1"}))
        sessions = [
            closing(WorkerSession(worker.endpoint, "scheduler-1", heartbeat=LENIENT, wants_log=True)) for _ in range(2)
        ]
        for session in sessions:
            await asyncio.wait_for(session.connect(), DEADLINE_S)
        try:
            raise ValueError("broken")
        except ValueError:
            forward.handle(logging.makeLogRecord(fields | {"msg": "after", "exc_info": sys.exc_info()}))
        worker.forward_log(LogLine(float("nan"), logging.WARNING, "engine", "at no time"))
        await until(lambda: "at no time" in caplog.messages)
        lines = [record for record in caplog.records if record.name == "engine"]
        assert [line.getMessage() for line in lines] == ["before any", "after", "at no time"]
        assert abs(lines[2].created - time.time()) < DEADLINE_S
        assert (lines[0].request_id, lines[0].fields["worker"]) == ("r1", "w")
        assert "ValueError: broken" in TextFormatter(colour=False).format(lines[1])
        for session in sessions:
            await session.close()


async def test_a_draining_worker_finishes_its_requests_and_takes_no_new_ones() -> None:
    async with running_worker() as worker, connected(worker) as session:
        engine = await open_fake(session, **LONG)
        job = engine.generate(prompt())
        chunks = await read_until(job, Tokens)
        draining = asyncio.create_task(worker.drain(DEADLINE_S))
        await until(lambda: session.is_draining)
        assert engine.lost.done()
        assert isinstance(end(await read(engine.generate(prompt()))).error, Unavailable)
        chunks += await read(job)
        assert end(chunks).reason == "stop"
        assert len(ids(chunks)) == 1000
        assert await draining


async def test_draining_has_a_time_limit() -> None:
    async with running_worker() as worker, connected(worker) as session:
        engine = await open_fake(session, **HANGING)
        await read_until(engine.generate(prompt()), Tokens)
        assert not await worker.drain(0.01)


async def test_a_worker_with_keys_over_tcp() -> None:
    keys = generate_keys()
    async with running_worker("tcp://127.0.0.1:*", keys=keys) as worker, connected(worker, keys=keys) as session:
        engine = await open_fake(session, echo=True)
        assert end(await read(engine.generate(prompt()))).reason == "stop"
