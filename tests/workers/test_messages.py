"""Encoding and decoding of messages, and their conversion from and to core types."""

from __future__ import annotations

import inspect
import json
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.core import engine as core
from modelyard.core import errors
from modelyard.core.engine import Media, Prompt, ReasoningBounds, ReasoningBudget, TokenRun
from modelyard.core.errors import ContextOverflow, Internal, ModelyardError, Overloaded, Unavailable
from modelyard.core.events import BlockDelta, Failed, Started, TokenLogprob, Usage
from modelyard.core.pool import LeaseRequest
from modelyard.core.request import Constraint, Image, Request, Sampling, Text
from modelyard.core.request import Message as ChatMessage
from modelyard.workers import messages
from modelyard.workers.messages import (
    VERSION,
    AddChat,
    AddRequest,
    ChatEvents,
    Goodbye,
    Heartbeat,
    Hello,
    MalformedMessage,
    OpenEngine,
    RequestReceived,
    TextChunks,
    ToClient,
    ToGateway,
    ToScheduler,
    ToWorker,
    UpdateBatch,
    WorkerReply,
    decode_for_client,
    decode_for_worker,
    encode,
    pack_error,
    unpack_error,
    version_mismatch,
    with_deadline,
    with_time_left,
)

CHUNKS = [
    core.Accepted(7, 3, evicted=True, elsewhere=5),
    core.Progress(1, 9),
    core.Tokens([1, 2, 3]),
    core.Tokens([5], [core.IdLogprob(5, -0.5, ((5, -0.5), (6, -1.5)))]),
    core.End("stop", Usage(1, 2, 3)),
    core.End("cancelled"),
    core.End("error", error=Unavailable("gone")),
]


@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda chunk: type(chunk).__name__)
def test_chunks_survive_the_wire(chunk: core.Chunk) -> None:
    batch = UpdateBatch([TextChunks(4, [chunk])])
    assert decode_for_client(encode(batch)) == batch


REQUEST = Request(
    model="m",
    messages=(ChatMessage("user", (Text("hi"), Image("data:image/png;base64,xx"))),),
    sampling=Sampling(temperature=0.5, logit_bias={3: 1.0}),
    metadata={"a": [1, None, {"b": "c"}]},
)
FOR_WORKER = [
    Hello(VERSION, "me"),
    Heartbeat(3),
    OpenEngine("e", core.EngineSpec("m", {"n": 1}, {"main": core.CacheInfo(9, 2)})),
    AddRequest("e", 1, Prompt(parts=(TokenRun([1, 2]),), sampling=Sampling(seed=3))),
    AddRequest("e", 1, Prompt(parts=(core.Media("image", "ab", b"\xff", 4),))),
    AddChat("e", 2, REQUEST),
]
FOR_CLIENT = [
    UpdateBatch(
        [TextChunks(1, [core.End("error", error=Unavailable("x"))])],
        {"e": core.EngineStats(caches={"main": core.CacheStats(sequences=())})},
    ),
    UpdateBatch(
        [
            ChatEvents(
                1,
                [
                    Started("i", "m", 1),
                    BlockDelta(0, "a", (TokenLogprob("a", -1.0, b"\xff"),)),
                    Failed(Unavailable("x")),
                ],
            )
        ]
    ),
    RequestReceived(1),
    WorkerReply(1, None, [[0.1, -1e300]], 9),
]


@pytest.mark.parametrize("message", FOR_WORKER, ids=lambda m: type(m).__name__)
def test_messages_for_a_worker_survive_the_wire(message) -> None:
    assert decode_for_worker(encode(message)) == message


@pytest.mark.parametrize("message", FOR_CLIENT, ids=lambda m: type(m).__name__)
def test_messages_for_a_client_survive_the_wire(message) -> None:
    assert decode_for_client(encode(message)) == message


@pytest.mark.parametrize("message", [*FOR_WORKER[:2], FOR_WORKER[3]], ids=lambda m: type(m).__name__)
def test_unknown_fields_are_ignored(message) -> None:
    longer = [*msgspec.msgpack.decode(encode(message)), {"from": "the future"}, 1]
    assert decode_for_worker(msgspec.msgpack.encode(longer)) == message


def test_no_two_messages_have_the_same_tag() -> None:
    for group in (ToWorker, ToClient, ToScheduler, ToGateway):
        tags = [kind.__struct_config__.tag for kind in (*group.__subclasses__(), Heartbeat, Goodbye)]
        assert len(tags) == len(set(tags))


@pytest.mark.parametrize(
    ("theirs", "expected"), [(VERSION + 1, "this side is older"), (VERSION - 1, "other side is older")]
)
def test_another_version_is_refused_with_a_reason(theirs: int, expected: str) -> None:
    assert expected in (version_mismatch(theirs) or "")
    assert version_mismatch(VERSION) is None


@given(st.binary(max_size=200))
def test_random_bytes_raise_malformed_message_or_decode(data: bytes) -> None:
    for read in (decode_for_worker, decode_for_client):
        with suppress(MalformedMessage):
            read(data)


@given(st.sampled_from([*FOR_WORKER, *FOR_CLIENT]), st.data())
def test_truncated_and_corrupted_messages_raise_malformed_message_or_decode(message, data) -> None:
    whole = bytearray(encode(message))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    for bent in (bytes(whole), bytes(whole[:at])):
        for read in (decode_for_worker, decode_for_client):
            with suppress(MalformedMessage):
                read(bent)


@pytest.mark.parametrize(
    "deep", [b"\x91" * 100_000, b"\x81\xa1a" * 50_000, b"\x94\xa4chat\xa1e\x01" + b"\x91" * 100_000]
)
def test_deeply_nested_messages_are_malformed(deep: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_for_worker(deep)


def test_a_prompt_is_smaller_on_the_wire_than_its_ids_as_json() -> None:
    ids = list(range(30_000, 31_024))
    wire = encode(AddRequest("0123456789abcdef", 1, Prompt(parts=(TokenRun(ids),))))
    assert len(wire) < 4 * len(ids) + 150
    assert len(wire) < len(json.dumps(ids)) * 0.6


def test_a_token_of_64_streams_takes_about_thirteen_bytes() -> None:
    frame = encode(UpdateBatch([TextChunks(i, [core.Tokens([30_000])]) for i in range(64)]))
    assert len(frame) / 64 < 14


def test_nothing_is_unpickled_and_only_transport_imports_zeromq() -> None:
    package = Path(messages.__file__).parents[1]
    for file in package.rglob("*.py"):
        imports = re.findall(r"^\s*(?:from|import)\s+(\w+)", file.read_text("utf-8"), re.MULTILINE)
        assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & set(imports), file
        assert "zmq" not in imports or file == package / "workers" / "transport.py", file


# --- prompts ----------------------------------------------------------------------------------------------------------

FULL = Prompt(
    parts=(TokenRun([1, 2]), Media("image", "ab", b"\0\1", 4), TokenRun([3])),
    sampling=Sampling(temperature=0.5, seed=7),
    max_tokens=99,
    stop_ids=(5, 6),
    constraint=Constraint("regex", "a+"),
    reasoning=ReasoningBudget(5, (ReasoningBounds("<think>", ("</think>",), (8,)),), 0),
    cache="main",
    scope="ann",
    session="s",
    priority="background",
    adapters=(("law", 0.5),),
    slot=1,
    post_sampling=True,
    logprobs=3,
    prompt_logprobs=1,
    logprobs_last=2,
    deadline=12.5,
    trace="t",
    dedup_key="j",
)


def test_the_example_prompt_sets_every_field() -> None:
    silent = [field.name for field in msgspec.structs.fields(Prompt) if getattr(FULL, field.name) == field.default]
    assert silent == [], "say something in it, or the next test shows nothing"


def test_every_field_of_a_prompt_survives_the_wire() -> None:
    message = AddRequest("e", 7, FULL)
    assert decode_for_worker(encode(message)) == message


def test_a_deadline_travels_as_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine has another clock."""
    here = SimpleNamespace(monotonic=lambda: 1000.0)
    there = SimpleNamespace(monotonic=lambda: 5.0)
    monkeypatch.setattr(messages, "time", here)
    sent = [
        with_time_left(Prompt(parts=(), deadline=1030.0)),
        with_time_left(LeaseRequest(model="m", cache="c", deadline=1030.0)),
        with_time_left(Prompt(parts=())),
    ]
    monkeypatch.setattr(messages, "time", there)
    assert [with_deadline(each).deadline for each in sent] == [35.0, 35.0, None]


# The wire form of errors.

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ModelyardError)]


def example(kind: type[ModelyardError]) -> ModelyardError:
    given_ = {"retry_after": 2.5} if issubclass(kind, errors.RateLimited) else {}
    numbers = {ContextOverflow: (9, 8), errors.OutputOverflow: (9, 8, 7)}
    return kind(*numbers.get(kind, ("words",)), **given_)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_class_survives_the_wire(kind: type[ModelyardError]) -> None:
    error = example(kind)
    assert unpack_error(pack_error(error)) == error


def test_an_unlisted_subclass_becomes_its_parent() -> None:
    class Special(Unavailable):
        pass

    assert unpack_error(pack_error(Special("gone", retry_after=7.0))) == Unavailable("gone", retry_after=7.0)


def test_an_error_of_an_unknown_class_keeps_its_message() -> None:
    error = unpack_error(["FromTheFuture", {"message": "no flux", "code": "flux"}, "more"])
    assert type(error) is Internal
    assert (error.message, error.code) == ("no flux", "flux")


def test_only_known_attributes_of_the_right_type_are_accepted() -> None:
    error = unpack_error(["Overloaded", {"message": "full", "position": "first", "kind": "invalid", "args": 3}])
    assert isinstance(error, Overloaded)
    assert error.kind == "overloaded"
    assert error.position is None


@pytest.mark.parametrize("packed", [None, [], ["Unavailable"], ["Unavailable", {}], [1, {"message": "x"}], {"a": 1}])
def test_an_error_without_a_message_is_malformed(packed) -> None:
    with pytest.raises(MalformedMessage):
        unpack_error(packed)
