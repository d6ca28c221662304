"""The engine's benchmark: requests to two kinds of servers, what a case gives, and what is compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.engine import (
    QUICK,
    Answer,
    Case,
    Measured,
    Plan,
    chat_async,
    chat_body,
    comparisons,
    read_answer,
    start_streams,
    summarize,
    summarize_beside,
)
from bench.servers import BACKGROUND, LLAMA_SERVER, OURS, Server, llama_cpp_config
from modelyard.config.load import load_config
from modelyard.library import default_model
from modelyard_bench.http_client import HttpResponse
from tests.live_server import LiveServer, demo_config, live_server


def server_of(served: LiveServer) -> Server:
    return Server(psutil.Process(), int(served.url.rpartition(":")[2]))


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"id": "1", **fields}).encode() + b"\n\n"


def text(content: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": content}, "finish_reason": finish}])


USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 2,
    "total_tokens": 102,
    "prompt_tokens_details": {"cached_tokens": 60},
}
DONE = b"data: [DONE]\n\n"


def response(*parts: tuple[float, bytes]) -> HttpResponse:
    return HttpResponse(1.0, status=200, parts=list(parts), ended=parts[-1][0])


def test_text_times_and_counts_are_read_from_a_stream() -> None:
    end = text("llo", "stop") + event(choices=[], usage=USAGE) + DONE
    answer = read_answer(response((1.5, text("He")), (1.7, end)))
    assert (answer.text, answer.tokens, answer.prompt, answer.evaluated) == ("Hello", 2, 100, 40)
    assert (answer.ttft, answer.times) == (0.5, (1.5, 1.7))


def test_a_server_that_reports_what_it_evaluated_is_believed() -> None:
    end = event(choices=[], usage=USAGE, timings={"prompt_n": 7, "prompt_ms": 1.0})
    assert read_answer(response((1.5, text("Hi", "stop") + end + DONE))).evaluated == 7


async def test_several_answers_come_from_a_running_server() -> None:
    body = chat_body("demo", [{"role": "user", "content": "Grüße"}], 8)
    with live_server(demo_config([{"steps": [{"tokens": 5}]}])) as served:
        answers = await chat_async(server_of(served), body, body, body)
        with pytest.raises(RuntimeError, match="400"):
            await chat_async(server_of(served), b'{"model": "demo"}')
    assert [answer.tokens for answer in answers] == [5, 5, 5]
    assert all(answer.sent <= answer.times[0] <= answer.times[-1] for answer in answers)


async def test_background_streams_all_run_when_they_are_started() -> None:
    with live_server(demo_config([{"steps": [{"text": "…"}, {"hang": True}]}])) as served:
        task = await start_streams(server_of(served), "demo", 3)
        assert served.status("demo").running == 3
        task.cancel()


async def test_refused_background_streams_are_an_error() -> None:
    refused = [{"steps": [{"fail": "out of memory", "kind": "unavailable"}]}]
    with live_server(demo_config(refused)) as served, pytest.raises(RuntimeError, match="did not start"):
        await start_streams(server_of(served), "demo", 1)


def answer(sent: float, *times: float) -> Answer:
    return Answer(sent, len(times), 32, 32, "", times)


def test_a_rate_counts_tokens_while_all_streams_run() -> None:
    early, late = answer(0.0, 1.0, 2.0, 3.0, 4.0), answer(0.0, 2.0, 2.5, 3.0, 3.5, 5.0)
    assert summarize([early, late], 4.0) == Measured((2 + 3) / 2, 1.5, 4.0, 1.5, 1.5)
    assert summarize([answer(0.0, 7.0, 8.0, 9.0)], 1.0).rate == 1.0


def test_gaps_beside_a_prompt_are_those_while_it_was_read() -> None:
    stream, read = answer(0.0, 1.0, 2.0, 2.5, 6.5, 7.0, 20.0), answer(2.2, 6.2, 6.3)
    found = summarize_beside(stream, read, 3.0)
    assert (found.gap_max, found.ttft, found.cpu_s) == (4.0, 4.0, 3.0)
    assert found.rate == (32 + 1) / 4.0  # the prompt, and one token of the stream
    assert summarize_beside(answer(0.0, 1.0, 2.0), read, 3.0).gap_max == 4.0  # it had ended, or said nothing at all


def test_streams_depths_and_prompts_are_those_of_the_targets() -> None:
    cases = Plan().cases
    assert [case.streams for case in cases if case.depth == 32] == [1, 2, 4, 8]
    assert [case.depth for case in cases if case.streams == 1] == [32, 512, 4096]
    assert Plan().window >= 4096 + 48
    assert (QUICK.rounds, QUICK.window <= 512) == (1, True)


def test_each_figure_has_its_counterpart_and_its_target() -> None:
    cases = (Case(1, 32, 16), Case(8, 32, 16))
    sides = (OURS, LLAMA_SERVER)
    found = {(name, case): [Measured(100.0 * case.streams, 0.1, 1.0)] for name in sides for case in cases}
    lines = list(comparisons(found, [Measured(100.0, 0.1, 1.0)], [Measured(80.0, 0.1, 1.0)]))
    assert [(line.name, line.bound, line.met) for line in lines if line.bound is not None] == [
        ("1 stream", 0.97, True),
        ("8 streams", 1.0, True),
        ("first token, prompt of 32", 1.05, True),
        ("ours with background streams, against alone", 0.9, False),
    ]


def test_model_names_are_routed_to_their_caches() -> None:
    caches = {"main": (512, 2), "fast": (256, 4)}
    config = load_config(env={}, overrides=llama_cpp_config(default_model.fetch(), 1, caches)).config
    routes = [(route.match, route.cache) for route in config.routes]
    assert routes == [([BACKGROUND], BACKGROUND), (["*haiku*"], "fast"), (["*"], "main")]
    assert config.caches["fast"].parallel == 4
    routes = llama_cpp_config(Path("x.gguf"), 1, {"main": (512, 2)})["routes"]
    assert [route["cache"] for route in routes] == [BACKGROUND, "main"]
