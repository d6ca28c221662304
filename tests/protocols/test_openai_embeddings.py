from __future__ import annotations

import base64
import struct
from typing import Any

import msgspec
import pytest

from modelyard.core.errors import ContextOverflow, InvalidRequest
from modelyard.core.request import EmbeddingRequest
from modelyard.protocols import openai_embeddings

VECTOR = [3.0, 4.0, 0.5]


def read(**fields: Any) -> EmbeddingRequest:
    return openai_embeddings.read_request(msgspec.json.encode({"model": "m", "input": "hi"} | fields), {})


def written(request: EmbeddingRequest, *vectors: list[float]) -> dict[str, Any]:
    out: dict[str, Any] = msgspec.json.decode(openai_embeddings.write_reply(list(vectors), 7, request))
    return out


def test_inputs_are_texts_or_token_ids() -> None:
    assert read() == EmbeddingRequest(model="m", inputs=("hi",))
    assert read(input=["a", "b"]).inputs == ("a", "b")
    assert read(input=[1, 2]).inputs == ((1, 2),)
    request = read(input=[[1], [2]], encoding_format="base64", dimensions=2, user="u")
    assert request == EmbeddingRequest(model="m", inputs=((1,), (2,)), encoding_format="base64", dimensions=2, user="u")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": ""}, "input", "empty text"),
        ({"input": ["a", ""]}, "input[1]", "empty text"),
        ({"input": []}, "input", "empty list"),
        ({"input": None}, "input", "required"),
        ({"encoding_format": "int8"}, "encoding_format", "float or base64"),
        ({"dimensions": 0}, "dimensions", "at least 1"),
        ({"input": 5}, "input", "got `int`"),
    ],
)
def test_an_invalid_field_is_named(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        read(**fields)
    assert caught.value.param == param


def test_vectors_are_numbered_and_counted() -> None:
    assert written(read(), VECTOR, [1.0, 0.0, 0.0]) == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": VECTOR},
            {"object": "embedding", "index": 1, "embedding": [1.0, 0.0, 0.0]},
        ],
        "model": "m",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }


def test_base64_holds_little_endian_floats() -> None:
    packed = written(read(encoding_format="base64"), VECTOR)["data"][0]["embedding"]
    assert list(struct.unpack("<3f", base64.b64decode(packed))) == VECTOR


def test_truncated_vectors_are_normalized() -> None:
    assert written(read(dimensions=2), VECTOR)["data"][0]["embedding"] == [0.6, 0.8]
    assert written(read(dimensions=1), [0.0, 1.0])["data"][0]["embedding"] == [0.0]


def test_more_dimensions_than_the_model_has_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="have 3") as caught:
        written(read(dimensions=4), VECTOR)
    assert caught.value.param == "dimensions"


def test_an_overflow_names_the_input_field() -> None:
    written = openai_embeddings.write_error(ContextOverflow(40, 32), trace="t")
    assert msgspec.json.decode(written.body)["error"]["param"] == "input"
