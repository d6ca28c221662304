"""Wire forms of numbers, prompts and errors."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.core import errors
from modelyard.core.engine import Media, Prompt, TokenRun
from modelyard.core.errors import ContextOverflow, Internal, InvalidRequest, ModelyardError, Overloaded, Unavailable
from modelyard.workers.messages import (
    MalformedMessage,
    flatten_prompt,
    pack_error,
    pack_ids,
    pack_vector,
    unflatten_prompt,
    unpack_error,
    unpack_ids,
    unpack_vector,
)

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=50)
MEDIA = st.builds(Media, st.just("image"), st.text(max_size=4), st.binary(max_size=8), st.integers(0, 99))


@given(IDS)
def test_token_ids_travel_as_four_bytes_each(ids: list[int]) -> None:
    packed = pack_ids(ids)
    assert len(packed) == 4 * len(ids)
    assert unpack_ids(packed) == ids


def test_ids_are_little_endian_whatever_the_machine() -> None:
    assert pack_ids([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"]])
def test_an_invalid_token_id_is_an_invalid_request(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="token ids"):
        pack_ids(ids)


@given(st.lists(st.floats(allow_nan=False)))
def test_vectors_lose_nothing(vector: list[float]) -> None:
    assert unpack_vector(pack_vector(vector)) == vector


@pytest.mark.parametrize("unpack", [unpack_ids, unpack_vector])
def test_a_partial_number_is_malformed(unpack) -> None:
    with pytest.raises(MalformedMessage, match="not a list of"):
        unpack(b"\0\0\0\0\0")


@given(
    st.lists(st.one_of(st.builds(TokenRun, st.lists(st.integers(0, 99), min_size=1, max_size=4)), MEDIA), min_size=1)
)
def test_prompts_keep_the_position_of_their_media(made) -> None:
    prompt = Prompt(parts=tuple(made))
    back = Prompt(parts=unflatten_prompt(*flatten_prompt(prompt)))
    assert back.ids == prompt.ids
    assert flatten_prompt(back) == flatten_prompt(prompt)
    assert back.n_tokens == prompt.n_tokens


def test_an_empty_prompt_stays_a_prompt() -> None:
    assert unflatten_prompt(b"", []) == (TokenRun([]),)


@pytest.mark.parametrize("offsets", [[5], [2, 1], [-1]])
def test_media_outside_their_prompt_are_malformed(offsets: list[int]) -> None:
    media = Media("image", "", b"", 1)
    with pytest.raises(MalformedMessage, match="outside"):
        unflatten_prompt(pack_ids([1, 2]), [(offset, media) for offset in offsets])


ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ModelyardError)]


def example(kind: type[ModelyardError]) -> ModelyardError:
    given_ = {"retry_after": 2.5} if kind is errors.RateLimited else {}
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
