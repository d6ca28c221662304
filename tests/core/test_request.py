"""Layers of sampling parameters, and requests as immutable data that crosses processes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.core.request import Message, Request, Sampling, Text, ToolCall, ToolResult

knobs = st.builds(
    Sampling,
    temperature=st.none() | st.floats(0, 2),
    top_k=st.none() | st.integers(0, 100),
    seed=st.none() | st.integers(),
    dry_sequence_breakers=st.none() | st.tuples(st.text(max_size=3)),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 9), st.floats(-1, 1), max_size=2),
)


def test_set_parameters_override_the_lower_layer():
    sampling = Sampling(temperature=0.0, top_k=5)
    assert sampling.over(Sampling(temperature=0.7, top_p=0.9)) == Sampling(temperature=0.0, top_p=0.9, top_k=5)


def test_an_empty_layer_returns_the_base():
    base = Sampling(temperature=0.7)
    assert Sampling().over(base) is base


@given(knobs, knobs, knobs)
def test_layering_is_associative(one: Sampling, two: Sampling, three: Sampling):
    assert one.over(two).over(three) == one.over(two.over(three))


@given(knobs, knobs)
def test_every_parameter_comes_from_the_upper_or_else_the_lower_layer(upper: Sampling, lower: Sampling):
    joined = upper.over(lower)
    for name in Sampling.__struct_fields__:
        mine, below, got = (getattr(layer, name) for layer in (upper, lower, joined))
        assert got == (below if mine is None else mine)


def test_a_request_is_plain_data_that_crosses_processes():
    call = ToolCall("c1", "look", '{"at": "half')
    request = Request(
        model="m",
        messages=(
            Message("user", (Text("hi"),)),
            Message("assistant", (call,)),
            Message("tool", (ToolResult("c1", (Text("seen"),)),)),
        ),
        sampling=Sampling(logit_bias={7: 0.5}),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request


def test_a_request_is_immutable():
    with pytest.raises(AttributeError):
        Request(model="m").model = "other"  # type: ignore[misc]
