"""Reasoning packed into a signature unpacks; foreign signatures do not."""

from __future__ import annotations

import base64
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.protocols.common.reasoning_signature import pack_reasoning, unpack_reasoning


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=200))
def test_packed_reasoning_unpacks_equal(text: str) -> None:
    assert unpack_reasoning(pack_reasoning(text)) == text


def test_a_lone_surrogate_survives() -> None:
    assert unpack_reasoning(pack_reasoning("\ud800")) == "\ud800"


def test_a_signature_is_never_empty_and_has_no_spaces() -> None:
    assert pack_reasoning("").isascii()
    assert pack_reasoning("")
    assert " " not in pack_reasoning("some thoughts\nof mine")


@pytest.mark.parametrize(
    "signature",
    [
        "",
        "EqQBCgIYAg==",
        "my1.",
        "my1.é",
        "my1.AAAA",
        "my1.not base64!",
        pack_reasoning("cut off somewhere in the middle")[:-12],
        "my1." + base64.urlsafe_b64encode(zlib.compress(b"\xff\xfe")).decode(),
    ],
)
def test_foreign_and_broken_signatures_unpack_to_none(signature: str) -> None:
    assert unpack_reasoning(signature) is None


def test_a_signature_cannot_unpack_without_limit() -> None:
    bomb = "my1." + base64.urlsafe_b64encode(zlib.compress(b"a" * (9 << 20), 9)).decode()
    assert len(bomb) < 20_000
    assert unpack_reasoning(bomb) is None
