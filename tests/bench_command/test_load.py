"""The load generator: samples, rounds, and its targets, the fake engine in process and servers by URL."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.errors import Incomplete, InvalidRequest, ModelyardError, NotFound, Unavailable
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event, Failed, Finished, Started, Usage
from modelyard_bench.load import (
    ChatTarget,
    EngineTarget,
    EventRecorder,
    LoadGenerator,
    Round,
    RoundLength,
    Sample,
    TokenTimer,
    UrlTarget,
    base_url,
    error_text,
)
from modelyard_bench.workload import UserTurn, Workload, get_workload
from tests.bench_command.fakes import ScriptedTarget, fake_engine, fake_tokenizer, run_round
from tests.bench_command.raw_server import chunk, responding, sse
from tests.live_server import LiveServer, demo_config, live_server

AGENT = get_workload("agent", prompt_tokens=20, turns=3)
CHAT = get_workload("chat", prompt_tokens=50, output_tokens=12)


# --- samples ----------------------------------------------------------------------------------------------------------


def test_the_first_token_and_each_gap_after_it_are_timed() -> None:
    timer = TokenTimer(10.0)
    for at in (10.5, 10.6, 10.8):
        timer.add(at)
    sample = timer.sample(11.0, prompt_tokens=7, cached_tokens=3, output_tokens=3)
    assert sample.ttft_s == pytest.approx(0.5)
    assert sample.gaps_s == pytest.approx((0.1, 0.2))
    assert sample.total_s == pytest.approx(1.0)
    assert sample.rate == pytest.approx(2 / 0.3)
    assert (sample.evaluated_tokens, sample.output_tokens, sample.is_counted) == (4, 3, False)


def test_tokens_that_arrive_together_share_their_wait() -> None:
    timer = TokenTimer(0.0)
    timer.add(1.0)
    timer.add(1.4, tokens=4)
    assert timer.sample(2.0, output_tokens=5).gaps_s == pytest.approx((0.1,) * 4)


def test_chunks_are_scaled_to_the_tokens_that_the_server_reports() -> None:
    timer = TokenTimer(0.0)
    for at in (1.0, 1.2, 1.4, 1.6):
        timer.add(at)
    sample = timer.sample(2.0, output_tokens=8)
    assert sample.gaps_s == pytest.approx((0.1,) * 3)
    assert sample.rate == pytest.approx(10.0)


def test_chunks_are_counted_without_usage_and_marked_as_such() -> None:
    timer = TokenTimer(0.0)
    timer.add(1.0)
    timer.add(2.0)
    sample = timer.sample(2.0)
    assert (sample.output_tokens, sample.is_counted) == (2, True)


def test_without_tokens_there_is_no_time_and_no_rate() -> None:
    timer = TokenTimer(0.0)
    timer.add(1.0, tokens=0)
    sample = timer.sample(3.0, error="broke")
    assert (sample.ttft_s, sample.rate, sample.output_tokens, sample.error) == (None, None, 0, "broke")
    assert Sample(output_tokens=3, ttft_s=1.0, gaps_s=(0.0, 0.0)).rate is None


def test_samples_without_an_error_have_succeeded() -> None:
    good, bad = Sample(output_tokens=1), Sample(error="no")
    assert Round(streams=1, wall_s=1.0, samples=(good, bad)).succeeded == [good]


START: list[Event] = [Started("1", "m", 0), BlockStart(0, "text")]


def test_visible_text_is_kept_and_reasoning_only_counted() -> None:
    recorder = EventRecorder(0.0)
    recorder.add([Started("1", "m", 0), BlockStart(0, "thinking"), BlockDelta(0, "hm")], 1.0)
    recorder.add([BlockEnd(0), BlockStart(1, "text"), BlockDelta(1, "for"), BlockDelta(1, "ty")], 2.0)
    recorder.add([BlockEnd(1), Finished("end", Usage(prompt=9, cached=2, output=3))], 3.0)
    sample = recorder.sample(3.0)
    assert recorder.text == "forty"
    assert (sample.ttft_s, sample.gaps_s) == (1.0, (0.5, 0.5))
    assert (sample.prompt_tokens, sample.cached_tokens, sample.output_tokens, sample.error) == (9, 2, 3, None)


def test_deltas_are_counted_if_the_server_reports_no_usage() -> None:
    recorder = EventRecorder(0.0)
    recorder.add([*START, BlockDelta(0, "a"), BlockDelta(0, "b"), BlockEnd(0), Finished("end", Usage())], 1.0)
    sample = recorder.sample(1.0)
    assert (sample.output_tokens, sample.prompt_tokens, sample.is_counted) == (2, 0, True)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ([Failed(Unavailable("lost the engine"))], "lost the engine"),
        ([], "the response is incomplete"),
        ([Finished("end", Usage(1, 0, 1))], None),
    ],
)
def test_a_response_has_an_error_unless_it_finished(end: list[Event], error: str | None) -> None:
    recorder = EventRecorder(0.0)
    recorder.add([*START, BlockDelta(0, "a"), *end], 1.0)
    assert recorder.sample(1.0).error == error


def test_equal_errors_have_equal_texts() -> None:
    assert error_text(Incomplete("cut")) == error_text(Incomplete("cut")) == "cut"


# --- the generator ----------------------------------------------------------------------------------------------------


async def test_every_stream_has_its_conversations_with_all_their_turns() -> None:
    target = ScriptedTarget()
    found = await run_round(target, AGENT, 2, streams=3)
    assert [len(turns) for turns in target.conversations] == [3] * 6
    assert (len(found.samples), found.streams) == (18, 3)
    assert found.wall_s > 0
    assert all(0 <= sample.began_s <= found.wall_s for sample in found.samples)


async def test_no_two_conversations_of_a_run_are_equal() -> None:
    target = ScriptedTarget()
    for key in ("0/2/0", "1/2/0", "0/2/1"):
        await run_round(target, CHAT, 2, streams=2, key=key)
    texts = [turns[0].text for turns in target.conversations]
    assert len(set(texts)) == len(texts) == 12


async def test_an_equal_seed_repeats_a_round() -> None:
    first, second, other = ScriptedTarget(), ScriptedTarget(), ScriptedTarget()
    for target, seed in ((first, 1), (second, 1), (other, 2)):
        await run_round(target, CHAT, streams=2, seed=seed)
    assert first.conversations == second.conversations != other.conversations


async def test_the_workload_sets_the_default_concurrency() -> None:
    assert (await run_round(ScriptedTarget(), get_workload("batch", prompt_tokens=4))).streams == 8


async def test_an_error_ends_the_conversation() -> None:
    target = ScriptedTarget(Sample(output_tokens=1), Sample(error="gone"))
    found = await run_round(target, AGENT, streams=1)
    assert [sample.error for sample in found.samples] == [None, "gone"]


async def test_a_stream_that_only_fails_gives_up_for_the_round() -> None:
    target = ScriptedTarget(Sample(error="gone"))
    found = await LoadGenerator(target, CHAT, RoundLength(seconds=600.0), streams=2).run()
    assert len(found.samples) == 6


async def test_a_success_resets_the_count_of_failures() -> None:
    failed, good = Sample(error="gone"), Sample(output_tokens=1)
    found = await run_round(ScriptedTarget(failed, failed, good), CHAT, 9, streams=1)
    assert len(found.samples) == 9


async def test_an_open_loop_starts_conversations_while_others_still_run() -> None:
    target = StuckTarget(answers=2)
    generator = LoadGenerator(target, CHAT, RoundLength(conversations=5), rate=1e4)
    running = asyncio.create_task(generator.run())
    while target.started < 5:  # noqa: ASYNC110  the target only counts
        await asyncio.sleep(0)
    assert len(generator.result().samples) == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("length", "done", "elapsed", "expected"),
    [
        (RoundLength(conversations=2), 1, 99.0, False),
        (RoundLength(conversations=2), 2, 0.0, True),
        (RoundLength(seconds=5.0), 99, 4.9, False),
        (RoundLength(seconds=5.0), 0, 5.0, False),
        (RoundLength(seconds=5.0), 1, 5.0, True),
    ],
)
def test_a_round_ends_at_its_length(length: RoundLength, done: int, elapsed: float, expected: bool) -> None:
    assert length.is_reached(done, elapsed) is expected


class StuckTarget:
    """Responds a few times, then never."""

    name = "stuck"

    def __init__(self, answers: int = 1) -> None:
        self.is_stuck = asyncio.Event()
        self.started, self._answers = 0, answers

    def start(self) -> StuckTarget:
        self.started += 1
        return self

    async def send(self, turn: UserTurn) -> Sample:
        if self._answers:
            self._answers -= 1
            return Sample(output_tokens=turn.output_tokens)
        self.is_stuck.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_cancelled_round_keeps_the_samples_until_then() -> None:
    target, seen = StuckTarget(), []
    generator = LoadGenerator(target, CHAT, RoundLength(conversations=2), streams=1, on_sample=seen.append)
    running = asyncio.create_task(generator.run())
    await target.is_stuck.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert list(generator.result().samples) == seen
    assert len(seen) == 1


# --- a text engine in process -----------------------------------------------------------------------------------------


async def test_prompts_and_outputs_have_exactly_the_wanted_length() -> None:
    async with fake_engine([{"tokens": 100}]) as engine:
        found = await run_round(EngineTarget(engine, fake_tokenizer()), CHAT, 3, streams=4)
    assert len(found.samples) == 12
    assert {(s.prompt_tokens, s.output_tokens, s.error) for s in found.samples} == {(50, 12, None)}
    assert not any(sample.is_counted for sample in found.samples)
    assert all(sample.ttft_s is not None and sample.ttft_s <= sample.total_s for sample in found.samples)


async def test_every_token_after_the_first_batch_has_its_gap() -> None:
    async with fake_engine([{"tokens": 4}, {"delay": 0.01}, {"tokens": 100}]) as engine:
        (sample,) = (await run_round(EngineTarget(engine, fake_tokenizer()), CHAT)).samples
    assert sample.output_tokens == 12
    assert len(sample.gaps_s) == 8
    assert sample.ttft_s is not None
    assert sample.ttft_s + sum(sample.gaps_s) <= sample.total_s


async def test_each_turn_finds_the_turns_before_it_in_the_cache() -> None:
    agent = get_workload("agent", prompt_tokens=100, turn_tokens=20, output_tokens=5, turns=3)
    async with fake_engine([{"tokens": 100}]) as engine:
        samples = (await run_round(EngineTarget(engine, fake_tokenizer(), cache="main"), agent)).samples
    assert [sample.prompt_tokens for sample in samples] == [100, 125, 150]
    first, second, third = (sample.cached_tokens for sample in samples)
    assert first == 0
    assert 100 <= second < 125 <= third


async def test_a_new_conversation_finds_nothing_in_the_cache() -> None:
    async with fake_engine([{"tokens": 100}]) as engine:
        samples = (await run_round(EngineTarget(engine, fake_tokenizer()), CHAT, 4, streams=1)).samples
    assert max(sample.cached_tokens for sample in samples) <= 6  # a digit or two of the leading number


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([{"tokens": 3}, {"fail": "out of memory", "kind": "unavailable"}], "out of memory"),
        ([{"fail": "no room", "kind": "overloaded"}], "no room"),
        ([{"tokens": 2}, {"die": "segmentation fault"}], "segmentation fault"),
    ],
)
async def test_a_job_that_fails_is_a_sample_with_its_error(steps: list[dict[str, object]], error: str) -> None:
    async with fake_engine(steps) as engine:
        (sample,) = (await run_round(EngineTarget(engine, fake_tokenizer()), CHAT)).samples
    assert sample.error == error


async def test_a_refused_prompt_is_a_sample_with_its_error() -> None:
    async with fake_engine([{"tokens": 3}], window=40) as engine:
        (sample,) = (await run_round(EngineTarget(engine, fake_tokenizer()), CHAT)).samples
    assert sample.error == "the prompt has 50 tokens and the window only 40"
    async with fake_engine([{"tokens": 3}]) as engine:
        (sample,) = (await run_round(EngineTarget(engine, fake_tokenizer(), cache="big"), CHAT)).samples
    assert sample.error == "the engine has no cache 'big'; it has main"


async def test_an_engine_that_hangs_reaches_the_time_limit_and_frees_its_slot() -> None:
    async with fake_engine([{"text": "a"}, {"hang": True}]) as engine:
        (sample,) = (await run_round(EngineTarget(engine, fake_tokenizer(), limit_s=0.05), CHAT)).samples
        assert sample.error == "not finished within 0.05 s"
        assert engine.stats().running == 0


async def test_cancelling_the_load_cancels_the_job() -> None:
    async with fake_engine([{"hang": True}]) as engine:
        task = asyncio.create_task(run_round(EngineTarget(engine, fake_tokenizer()), CHAT))
        async with asyncio.timeout(60):
            while not engine.stats().running:  # noqa: ASYNC110  the engine only counts
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while engine.stats().running:  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_a_target_has_the_name_of_its_engine_unless_it_is_given_one() -> None:
    async with fake_engine([]) as engine:
        assert EngineTarget(engine, fake_tokenizer()).name == "fake"
        assert EngineTarget(engine, fake_tokenizer(), name="mine").name == "mine"


# --- a chat engine in process -----------------------------------------------------------------------------------------

SHORT = get_workload("chat", prompt_tokens=60, output_tokens=12)


async def test_a_chat_engine_is_measured_by_its_events() -> None:
    async with fake_engine([{"think": "Hm."}, {"tokens": 8}], kind="chat") as engine:
        found = await run_round(ChatTarget(engine, "demo"), SHORT, 2, streams=3)
    assert len(found.succeeded) == 6
    assert all(sample.output_tokens > 0 and sample.ttft_s is not None for sample in found.samples)


async def test_a_chat_engine_gets_prompts_near_the_wanted_length() -> None:
    async with fake_engine([{"tokens": 8}], kind="chat") as engine:
        samples = (await run_round(ChatTarget(engine, "demo"), SHORT, 20, streams=1)).samples
    assert samples[0].prompt_tokens > 0
    assert abs(sum(s.prompt_tokens for s in samples[5:]) / 15 - 60) < 12


async def test_later_turns_of_a_chat_contain_the_earlier_ones() -> None:
    agent = get_workload("agent", prompt_tokens=60, turn_tokens=20, output_tokens=5, turns=3)
    async with fake_engine([{"tokens": 5}], kind="chat") as engine:
        lengths = [s.prompt_tokens for s in (await run_round(ChatTarget(engine, "demo"), agent)).samples]
    assert lengths[0] < lengths[1] < lengths[2]


async def test_a_chat_engine_that_fails_or_hangs_is_a_sample_with_its_error() -> None:
    async with fake_engine([{"tokens": 3}, {"fail": "out of memory"}], kind="chat") as engine:
        (sample,) = (await run_round(ChatTarget(engine, "demo"), SHORT)).samples
    assert sample.error == "out of memory"
    async with fake_engine([{"hang": True}], kind="chat") as engine:
        (sample,) = (await run_round(ChatTarget(engine, "demo", limit_s=0.05), SHORT)).samples
        assert sample.error == "not finished within 0.05 s"
        assert engine.stats().running == 0


# --- servers ----------------------------------------------------------------------------------------------------------

URL_CHAT = get_workload("chat", prompt_tokens=60, output_tokens=24)
SCRIPT: list[dict[str, Any]] = [{"steps": [{"think": "Hm."}, {"tokens": 100}]}]


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    with live_server(demo_config(SCRIPT)) as running:
        yield running


async def measured(url: str, workload: Workload = URL_CHAT, conversations: int = 1, **more: Any) -> Round:
    streams = more.pop("streams", 1)
    async with UrlTarget(url, **more) as target:
        return await run_round(target, workload, conversations, streams=streams)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("http://h:8000/", "http://h:8000/v1"),
        ("http://h:8000/v1", "http://h:8000/v1"),
        ("https://h/api/v1/", "https://h/api/v1"),
        ("http://h/v1/chat/completions", "http://h/v1"),
    ],
)
def test_a_url_is_accepted_with_or_without_its_path(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize("url", ["localhost:8000", "", "ftp://h", "http://", "http://h:99999", "http://h:0"])
def test_an_invalid_url_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"not a URL such as http://127\.0\.0\.1:8000"):
        UrlTarget(url)


async def test_streams_of_a_real_server_are_measured(served: LiveServer) -> None:
    found = await measured(served.url, conversations=3, streams=4, model="demo")
    assert {sample.error for sample in found.samples} == {None}
    assert {sample.output_tokens for sample in found.samples} == {24}
    assert not any(sample.is_counted for sample in found.samples)
    assert all(sample.ttft_s is not None and sample.ttft_s <= sample.total_s for sample in found.samples)


async def test_prompts_come_near_the_wanted_length(served: LiveServer) -> None:
    samples = (await measured(served.url, conversations=20, model="demo")).samples
    assert abs(sum(s.prompt_tokens for s in samples[5:]) / 15 - 60) < 12


async def test_later_turns_are_cached_by_the_server(served: LiveServer) -> None:
    agent = get_workload("agent", prompt_tokens=200, turn_tokens=20, output_tokens=5, turns=3)
    first, second, third = (await measured(served.url, agent, model="demo")).samples
    assert first.cached_tokens < 100 < second.cached_tokens < third.cached_tokens


async def test_the_first_listed_model_is_the_default(served: LiveServer) -> None:
    async with UrlTarget(served.url) as target:
        assert target.model == "demo"


async def test_extra_fields_are_added_to_every_request(served: LiveServer) -> None:
    found = await measured(served.url, model="demo", extra={"max_tokens": 3})
    assert found.samples[0].output_tokens == 3
    refused = await measured(served.url, model="demo", extra={"temperature": -1})
    assert refused.samples[0].error == "400: temperature must be between 0 and 2, got -1.0"


async def test_a_wrong_key_is_an_error() -> None:
    config = demo_config(SCRIPT) | {"keys": [{"name": "me", "env": "ITS_KEY"}]}
    with live_server(config, {"ITS_KEY": "sesame-open-please"}) as locked:
        (sample,) = (await measured(locked.url, model="demo")).samples
        assert sample.error is not None
        assert sample.error.startswith("401: ")
        assert (await measured(locked.url, key="sesame-open-please")).succeeded
        with pytest.raises(ModelyardError, match="key"):
            await measured(locked.url)


def test_a_key_that_is_not_a_header_value_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="an HTTP header must not have"):
        UrlTarget("http://h", key="schlüssel")


async def test_a_response_that_fails_or_hangs_is_an_error() -> None:
    steps = [{"tokens": 5}, {"delay": 0.05}, {"fail": "out of memory", "kind": "unavailable"}]
    hang = [{"text": "so far"}, {"hang": True}]
    with live_server(demo_config([{"when": "agent", "steps": steps}, {"steps": hang}])) as broken:
        async with UrlTarget(broken.url, "demo", limit_s=0.5) as target:
            failed, _ = await target.chat([{"role": "user", "content": "agent"}], 10)
            stuck, _ = await target.chat([{"role": "user", "content": "hang"}], 10)
    assert failed.error is not None
    assert failed.error.endswith("out of memory")
    assert stuck.error == "not finished within 0.5 s"
    assert stuck.ttft_s is not None


async def test_chunks_are_counted_if_a_server_reports_no_usage() -> None:
    async with responding(sse(chunk("a"), chunk("b"), chunk("", '"stop"'), "[DONE]")) as url:
        (sample,) = (await measured(url, model="x")).samples
    assert (sample.error, sample.output_tokens, sample.is_counted) == (None, 2, True)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (sse(chunk("a")), "the upstream's stream ended before its answer did"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy", "503: "),
        (b"nonsense\r\n\r\n", "the connection broke: "),
    ],
)
async def test_every_failure_of_a_server_is_an_error(reply: bytes, error: str) -> None:
    async with responding(reply) as url:
        (sample,) = (await measured(url, model="x")).samples
    assert sample.error is not None
    assert sample.error.startswith(error)


async def test_a_server_that_never_responds_reaches_the_time_limit() -> None:
    async with responding(b"") as url:
        (sample,) = (await measured(url, model="x", limit_s=0.2)).samples
        assert (sample.error, sample.ttft_s) == ("not finished within 0.2 s", None)
        with pytest.raises(Unavailable, match=r"does not respond: not finished within 0\.2 s"):
            await measured(url, limit_s=0.2)


async def test_a_server_that_closes_connections_without_notice_has_not_failed() -> None:
    """No content-length, no `connection: close`, one response per connection: as llama-server does after a stream."""
    body = sse(chunk("a"), chunk("", '"stop"'), "[DONE]").partition(b"\r\n\r\n")[2]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    async with responding(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)) as url:
        found = await measured(url, model="x", conversations=20)
    assert [sample.error for sample in found.samples] == [None] * 20


async def test_a_closed_port_is_an_error() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # taken, but not listening
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        found = await measured(url, model="x", conversations=9)
        assert [sample.error for sample in found.samples] == ["connection refused"] * 3
        with pytest.raises(Unavailable, match="does not respond: connection refused"):
            await measured(url)


async def test_a_server_without_a_list_of_models_needs_a_name() -> None:
    async with responding(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}") as url:
        with pytest.raises(NotFound, match="lists no models; name one with --model"):
            await measured(url)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return cert, key


async def test_tls_connections_are_reused_and_certificates_are_verified(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate
    with live_server(demo_config(SCRIPT) | {"http": {"ssl_certfile": str(cert), "ssl_keyfile": str(key)}}) as secure:
        async with UrlTarget(secure.url, "demo") as target:
            refused, _ = await target.chat([{"role": "user", "content": "hi"}], 5)
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        async with UrlTarget(secure.url, "demo") as target:
            opened = set[object]()
            for _ in range(2):
                sample, _ = await target.chat([{"role": "user", "content": "hi"}], 5)
                assert (sample.error, sample.output_tokens) == (None, 5)
                opened |= target._client._open_client()._pool.connections
            assert len(opened) == 1
    assert "CERTIFICATE_VERIFY_FAILED" in (refused.error or "")
