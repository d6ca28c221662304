"""The fuzzer finds what is planted, names it once, and makes its example small."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from modelyard.workers import messages as msg
from tests.fuzz.explore import Finding, Results, Target, explore_all, explore_for
from tests.fuzz.file_targets import ModelFile, gguf_of, random_file
from tests.fuzz.frame_targets import Frames, _reader
from tests.fuzz.http_targets import HttpCall, HttpTargets
from tests.fuzz.values import Values, code_words, damaged, shrunk
from tests.library.files import gguf_bytes

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "size": {"type": "integer", "minimum": 5},
        "rest": {"$ref": "#/x/More"},
    },
    "required": ["kind"],
}
COMPONENTS = {"More": {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "string"}]}}}


def test_values_follow_their_schema() -> None:
    values, rng = Values(["word"], COMPONENTS), Random(1)
    made = [values.of(SCHEMA, rng) for _ in range(300)]
    assert {one["kind"] for one in made} == {"a", "b"}
    assert {4, 5, 6} <= {one["size"] for one in made if "size" in one}
    assert all(isinstance(part, str | None) for one in made for part in one.get("rest", ()))
    assert any("word" in one.get("rest", ()) for one in made)


def test_the_same_seed_gives_the_same_values() -> None:
    def run() -> list[str]:
        values, rng = Values(["word"], COMPONENTS), Random(3)
        made = [values.mutated(values.of(SCHEMA, rng), rng, 2) for _ in range(50)]
        return [json.dumps(one) for one in made] + [repr(damaged(b"0123456789", rng)) for _ in range(50)]

    assert run() == run()


def test_words_are_the_short_literals_of_the_code(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text('"""Docstring"""\nx = {"type": "tool_use", "text": "two words"}\n')
    assert code_words(tmp_path / "m.py") == ["text", "tool_use", "type"]


def test_an_example_is_shrunk_to_what_matters() -> None:
    whole = {"a": [1, {"bad": "x" * 100, "c": 2}], "d": {"e": 3}}
    small = shrunk(whole, lambda value: "bad" in json.dumps(value))
    assert len(json.dumps(small)) < 40


def planted(fails: Callable[[int], bool]) -> Target[int]:
    def check(value: int) -> str:
        if fails(value):
            raise Finding("5xx", "planted", f"the value {value}")
        return "200"

    def smaller(value: int, still_fails: Callable[[int], bool]) -> int:
        while still_fails(value - 1):
            value -= 1
        return value

    return Target("planted", lambda rng: rng.randrange(100), check, smaller)


def test_a_finding_is_reported_once_with_its_smallest_input() -> None:
    results = Results()
    explore_all([planted(lambda value: value > 40)], 200, 1, results)
    (finding,) = results.findings.values()
    assert finding.detail == "the value 41"
    assert results.outcomes["planted"].total() == 200
    assert results.outcomes["planted"]["5xx"] > 100


def test_a_long_run_ends_in_time_and_takes_turns() -> None:
    results, other = Results(), planted(lambda _: False)._replace(name="other")
    explore_for([planted(lambda _: False), other], 0.05, 1, results, batch=5)
    assert set(results.outcomes) == {"planted", "other"}


# --- replies ----------------------------------------------------------------------------------------------------------

GOOD = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}}
IDS = {"x-request-id": "req_1", "request-id": "req_1"}
CALL = HttpCall("POST", "/v1/chat/completions", {}, b"{}")


def targets(status: int, body: Any, log: str = "", kind: str = "application/json") -> HttpTargets:
    document = {"paths": {CALL.path: {"post": {}}}, "components": {"schemas": {}}}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/openapi.json":
            return httpx.Response(200, json=document)
        if request.url.path == "/v1/admin/models":
            return httpx.Response(200, json={"data": []})
        content = body if isinstance(body, str) else json.dumps(body)
        return httpx.Response(status, headers=IDS | {"content-type": kind}, text=content)

    client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://test")
    return HttpTargets(client, lambda: log, ["demo"])


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (partial(targets, 500, GOOD), "5xx"),
        (partial(targets, 400, {"detail": "no"}), "wrong shape"),
        (partial(targets, 400, "no"), "wrong shape"),
        (partial(targets, 200, []), "wrong shape"),
        (partial(targets, 200, GOOD, log="Traceback (most recent call last):\nKeyError: 1"), "traceback"),
        (partial(targets, 200, 'data: {"a":1}\n\n', kind="text/event-stream"), "wrong shape"),
    ],
    ids=["5xx", "another shape", "no JSON", "a list", "traceback", "a stream without its end"],
)
def test_every_kind_of_fault_is_found(make: Callable[[], HttpTargets], kind: str) -> None:
    server = make()
    with pytest.raises(Finding) as found:
        server.check(CALL)
    assert (found.value.kind, found.value.where) == (kind, "POST /v1/chat/completions")


def test_good_replies_pass() -> None:
    assert targets(400, GOOD).check(CALL) == "400"
    assert targets(200, {}).check(CALL) == "200"
    assert targets(200, "data: {}\n\ndata: [DONE]\n\n", kind="text/event-stream").check(CALL) == "200"


# --- frames and files -------------------------------------------------------------------------------------------------


def test_frames_reach_every_message_of_the_protocol() -> None:
    frames, rng, seen = Frames(msg.ToScheduler), Random(1), Counter[type]()
    for _ in range(1500):
        try:
            seen[type(msg.decode_for_scheduler(frames.one(rng)))] += 1
        except msg.MalformedMessage:
            seen[type(None)] += 1
    assert {*msg.ToScheduler.__subclasses__(), type(None)} <= set(seen)


def test_a_reader_that_raises_anything_else_is_a_finding() -> None:
    def broken(_: bytes) -> msg.LinkMessage:
        raise KeyError("x")

    with pytest.raises(Finding, match="exception at frames: KeyError"):
        _reader("frames", broken)(b"\x90")


def test_headers_are_written_as_gguf() -> None:
    assert gguf_of({"version": 3, "entries": [], "tensors": []})[:24] == gguf_bytes()[:8] + b"\0" * 16
    assert ModelFile({"version": 3}, noise=5).gguf() == ModelFile({"version": 3}, noise=5).gguf()
    assert len({random_file(Random(n)).gguf() for n in range(20)}) > 15
