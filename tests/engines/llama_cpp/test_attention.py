"""How attention is computed: what the user said, else by the backend."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.engines.llama_cpp import loading
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
def test_the_users_word_comes_first_then_the_backend(asked: Any, gpu: bool, mode: loading.FlashAttentionMode) -> None:
    assert loading.flash_attention_mode(Options(path="x", flash_attn=asked), gpu=gpu) == mode


def test_a_cache_may_differ_from_its_model() -> None:
    options = Options(path="x", flash_attn="on").of(CacheInfo(64, flash_attn=False))
    assert loading.flash_attention_mode(options, gpu=False) == "off"


def spec(*caches: CacheInfo, **options: Any) -> EngineSpec:
    named = {str(number): info for number, info in enumerate(caches or (CacheInfo(64),))}
    return EngineSpec("m", Options(path="x", **options), named)


def test_where_it_is_slow_the_plain_way_is_taken() -> None:
    assert loading.resolve_flash_attention(spec(), gpu=False, slow=lambda: True).options.flash_attn == "off"
    assert loading.resolve_flash_attention(spec(), gpu=False, slow=lambda: False) == spec()


@pytest.mark.parametrize(
    "asked",
    [
        spec(flash_attn="on"),
        spec(CacheInfo(64, flash_attn=True)),
        spec(CacheInfo(64), CacheInfo(64, type_v="q8_0")),
        spec(CacheInfo(64, type_v="f32")),
    ],
)
def test_a_wish_or_values_that_are_no_halves_leave_it_as_it_is(asked: EngineSpec) -> None:
    assert loading.resolve_flash_attention(asked, gpu=False, slow=lambda: True) == asked


def test_a_gpu_is_not_looked_at() -> None:
    assert loading.resolve_flash_attention(spec(), gpu=True, slow=lambda: pytest.fail("nobody needs to know")) == spec()
