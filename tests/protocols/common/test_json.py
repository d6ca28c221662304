"""Decoding of request bodies: every invalid body gives an error that names the field."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings

from modelyard.core.errors import InvalidRequest
from modelyard.protocols.common.json import decode, dumps, encode
from tests import strategies


class Inner(msgspec.Struct):
    size: int


class Outer(msgspec.Struct):
    inner: Inner
    names: list[str] = []


DECODER = msgspec.json.Decoder(Outer)


def refused(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(DECODER, body)
    return caught.value


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b'{"inner":{"size":"x"}}', "inner.size", "inner.size: Expected `int`, got `str`"),
        (b'{"inner":{"size":1},"names":[5]}', "names[0]", "Expected `str`, got `int`"),
        (b'{"inner":{}}', "inner", "missing required field `size`"),
        (b"{}", None, "missing required field `inner`"),
        (b"[]", None, "Expected `object`, got `array`"),
    ],
)
def test_a_wrong_type_is_reported_with_its_path(body: bytes, param: str | None, message: str) -> None:
    error = refused(body)
    assert (error.param, error.code) == (param, "invalid_type")
    assert message in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b'{"inner":NaN}',
        b'{"names":["\\ud800"]}',
        b'{"names":["\xff"]}',
        b"\xef\xbb\xbf{}",
        b'{"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    ],
)
def test_invalid_json_is_refused(body: bytes) -> None:
    assert refused(body).code == "invalid_json"


def test_unknown_fields_are_accepted() -> None:
    assert decode(DECODER, b'{"inner":{"size":1,"more":[]},"else":{}}') == Outer(Inner(1))


@settings(deadline=None, max_examples=50)
@given(strategies.json_objects())
def test_encoded_values_decode_equal(value: dict[str, object]) -> None:
    assert msgspec.json.decode(encode(value)) == value
    assert msgspec.json.decode(dumps(value)) == value
