"""How attention is computed: what the user said, else by the backend."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.engine import CacheInfo
from modelyard.engines.llama_cpp import attention
from modelyard.engines.llama_cpp.options import Options


@pytest.mark.parametrize(
    ("asked", "gpu", "mode"),
    [
        (None, False, "on"),
        (None, True, "auto"),
        (True, True, "on"),
        (False, False, "off"),
        ("auto", False, "auto"),
        ("off", True, "off"),
        ("on", True, "on"),
    ],
)
def test_the_users_word_comes_first_then_the_backend(asked: Any, gpu: bool, mode: attention.Mode) -> None:
    assert attention.mode(Options(path="x", flash_attn=asked), gpu=gpu) == mode


def test_a_cache_may_differ_from_its_model() -> None:
    options = Options(path="x", flash_attn="on").of(CacheInfo(64, flash_attn=False))
    assert attention.mode(options, gpu=False) == "off"
