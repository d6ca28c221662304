"""The gateway's benchmark: what a round gives, the rows and targets, and the baseline server."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import AsyncIterator

import psutil
import pytest
from msgspec.structs import replace
from rich.console import Console

from bench import baseline_server
from bench.baseline_server import STREAM, BaselineProtocol, request_length
from bench.gateway import (
    AddedTtft,
    ConversationCost,
    Plan,
    Results,
    ServerSample,
    alternating_ttft,
    in_flight,
    notes,
    proxy_rows,
    request_body,
    rows,
    show,
    summarize,
)
from bench.servers import LITELLM, OURS, SMG, Server, litellm_config
from modelyard_bench.load import Round, Sample
from modelyard_bench.statistics import Distribution

TIMES = Distribution.of([0.001, 0.002])


def samples(*responses: int, errors: int = 0, rss: float = 200.0, others: float = 0.0) -> list[ServerSample]:
    return [
        ServerSample(
            responses=count,
            errors=errors,
            first_error="503" if errors else "",
            events=count * 19,
            seconds=2.0,
            in_flight=1000,
            ttft_s=TIMES,
            gap_s=TIMES,
            cpu_s=1.0,
            rss_mb=rss,
            other_cores=others,
        )
        for count in responses
    ]


def results(**changed: object) -> Results:
    fields: dict[str, object] = {
        "plan": Plan(),
        "requests": {OURS: samples(5990, 6000, 6010), LITELLM: samples(100, 100, 100)},
        "events": {OURS: samples(2000), LITELLM: samples(10)},
        "streams": samples(5000),
        "added_ttft": AddedTtft(0.6, 1.1, 0.1),
        "conversation": ConversationCost(20_000, 50.0, 1.5, 3.0, 0.2),
        "proxied": {OURS: samples(3500), LITELLM: samples(100), SMG: samples(5000)},
        "bare_client": [7000.0],
        "proxied_streams": samples(5000),
        "proxied_ttft": AddedTtft(0.9, 1.5, 0.1),
    }
    return Results(**(fields | changed))  # type: ignore[arg-type]


def test_both_sides_their_ratio_and_the_targets_share_a_row() -> None:
    first = next(rows(results()))
    theirs, ratio = first.theirs[LITELLM]
    assert (first.ours, theirs) == (r"6,000 \[5,975, 6,025]", r"100 \[100, 100]")
    assert ratio.startswith("60.0×")
    assert (first.target, first.met) == ("≥ 3,500, ≥ 25× LiteLLM", True)
    assert [row.target for row in rows(results()) if row.target][1:] == ["≥ 35,000", "0", "< 286 MiB", "≤ 1 ms"]


def test_a_target_can_be_missed_by_the_ratio_alone() -> None:
    found = {OURS: samples(6000), LITELLM: samples(300)}
    assert next(rows(results(requests=found))).met is False


def test_without_others_only_our_own_target_counts() -> None:
    first = next(rows(results(requests={OURS: samples(6000)})))
    assert (first.theirs, first.target, first.met) == ({}, "≥ 3,500", True)


def test_events_errors_memory_and_latency_can_miss_their_targets() -> None:
    poor = results(
        events={OURS: samples(1000)}, streams=samples(10, errors=1, rss=301.0), added_ttft=AddedTtft(1.2, 5.2, 0.1)
    )
    assert [row.name.strip() for row in rows(poor) if row.met is False] == [
        *("SSE events per CPU-second", "errors", "RSS", "added TTFT p50, one request at a time")
    ]


def test_errors_and_a_busy_machine_are_noted() -> None:
    assert not any("other programs" in note or "an error" in note for note in notes(results()))
    noted = list(notes(results(streams=samples(10, errors=1, others=1.3))))
    assert any("1.3 cores" in note for note in noted)
    assert any("an error: 503" in note for note in noted)


def test_a_proxy_is_compared_with_a_proxy() -> None:
    targets = [(row.target, row.met) for row in proxy_rows(results()) if row.target]
    first = ("≥ 2,500, ≥ 15× LiteLLM, ≥ 0.6× smg", True)
    assert targets == [first, ("0", True), ("< 286 MiB", True), ("≤ 1 ms", True)]
    behind = results(proxied={OURS: samples(3500), SMG: samples(7000)})
    assert next(proxy_rows(behind)).met is False
    slow = results(proxied={OURS: samples(2000), LITELLM: samples(100)}, proxied_ttft=AddedTtft(1.3, 2.0, 0.1))
    assert [row.met for row in proxy_rows(slow) if row.target] == [False, True, True, False]


def test_the_report_has_a_table_for_each_kind_of_comparison() -> None:
    out = io.StringIO()
    show(results(), Console(file=out, width=200))
    assert "LiteLLM (mock)" in out.getvalue()
    assert "LiteLLM (proxy)" in out.getvalue()
    assert "smg (proxy)" in out.getvalue()
    assert litellm_config(mock_response="hi")["model_list"][0]["litellm_params"]["mock_response"] == "hi"


def test_requests_in_flight_are_counted_in_the_middle_of_the_round() -> None:
    long = [Sample(began_s=float(n), total_s=100.0) for n in range(11)]
    assert in_flight(long) == 6
    assert in_flight([replace(sample, total_s=0.001) for sample in long]) == 0
    assert in_flight([]) == 0


def test_a_round_is_summed_up() -> None:
    good, bad = Sample(events=19, ttft_s=0.2, gaps_s=(0.1,), total_s=0.3), Sample(error="refused")
    found = summarize(Round(streams=2, wall_s=2.0, samples=(good, good, bad)), 0.5, 100.0, 0.1)
    assert (found.responses, found.errors, found.first_error, found.events) == (2, 1, "refused", 38)
    assert (found.ttft_s.p50, found.gap_s.p50, found.cpu_s) == (0.2, 0.1, 0.5)


# --- the baseline server ----------------------------------------------------------------------------------------------


@pytest.fixture
async def baseline() -> AsyncIterator[Server]:
    server = await asyncio.get_running_loop().create_server(BaselineProtocol, "127.0.0.1", 0)
    async with server:
        yield Server(psutil.Process(), server.sockets[0].getsockname()[1])


async def test_streams_alternate_between_two_servers(baseline: Server) -> None:
    first, second = await alternating_ttft(baseline, baseline, 4)
    assert len(first) == len(second) == 4
    assert min(first) > 0


@pytest.mark.parametrize(
    ("received", "length"),
    [
        (b"POST / HTTP/1.1\r\ncontent-len", None),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n", 43),
        (b"GET / HTTP/1.1\r\n\r\n", 18),
    ],
)
def test_the_length_of_a_request_is_known_with_its_head(received: bytes, length: int | None) -> None:
    assert request_length(received) == length
    assert STREAM.endswith(b"0\r\n\r\n")
    assert len(baseline_server.EVENTS) == 16 + 3


def test_the_body_streams_on_request() -> None:
    assert "stream" not in json.loads(request_body(stream=False))
    assert json.loads(request_body(stream=True))["stream"] is True


def test_the_cpu_clock_of_a_process_advances_with_its_work() -> None:
    server = Server(psutil.Process(os.getpid()), 0)
    before = server.cpu_s()
    sum(range(100_000))
    assert server.cpu_s() > before
    assert server.rss_mb() > 0
    assert server.peak_mb() >= 1
