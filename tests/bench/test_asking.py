"""The benchmark's client: chunked answers taken apart, and what two kinds of servers count."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.asking import ask, body, dechunked, read, request
from bench.stats import Stream
from tests.serving import Served, demo, serving


def chunked(*pieces: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


def port(server: Served) -> int:
    return int(server.url.rpartition(":")[2])


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def said(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])


USAGE = {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 60}}
DONE = b"data: [DONE]\n\n"


def test_an_event_that_is_cut_between_chunks_is_whole_again():
    line = said("Hello")
    assert dechunked(chunked(line[:9], line[9:], DONE)) == line + DONE


def test_text_times_and_counts_come_out_of_a_stream():
    head, tail = chunked(said("He"))[:-5], chunked(said("llo"), event(choices=[], usage=USAGE), DONE)
    parts = ((1.5, head), (1.7, tail.partition(b"\r\n\r\n")[2]))
    answer = read(Stream(1.0, parts))
    assert (answer.text, answer.tokens, answer.prompt, answer.evaluated) == ("Hello", 2, 100, 40)
    assert (answer.ttft, answer.last) == (0.5, 1.7)


def test_a_server_that_says_what_it_evaluated_is_believed():
    raw = chunked(said("Hi"), event(choices=[], usage=USAGE, timings={"prompt_n": 7}), DONE)
    assert read(Stream(0.0, ((1.0, raw),))).evaluated == 7


def test_a_request_has_the_length_of_its_body():
    asked = body("demo", [{"role": "user", "content": "Grüße"}], 4)
    head, _, rest = request(1, asked).partition(b"\r\n\r\n")
    assert rest == asked
    assert f"Content-Length: {len(asked)}".encode() in head


def test_several_answers_come_from_a_running_server():
    asked = body("demo", [{"role": "user", "content": "Hello"}], 8)
    with serving(demo([{"steps": [{"tokens": 5}]}])) as server:
        answers = ask(port(server), asked, asked, asked)
    assert [answer.tokens for answer in answers] == [5, 5, 5]
    assert all(answer.sent <= answer.first <= answer.last for answer in answers)


def test_a_refusal_is_an_error_that_shows_the_servers_words():
    with serving(demo([{"steps": [{"tokens": 5}]}])) as server, pytest.raises(RuntimeError, match="400"):
        ask(port(server), b'{"model": "demo"}')
