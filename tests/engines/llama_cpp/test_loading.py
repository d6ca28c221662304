"""Options as parameters of a context: flash attention, names of settings, types of KV caches."""

from __future__ import annotations

import json
import mmap
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from modelyard.config.load import load_config
from modelyard.config.settings import engine_spec
from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.core.errors import InvalidRequest
from modelyard.engines.llama_cpp import loading
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.loading import HugePages
from modelyard.engines.llama_cpp.options import FlashAttentionMode, Options, flash_attention_mode
from tests.engines.llama_cpp.helpers import model_file


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
def test_the_users_flash_attention_setting_wins_over_the_default_of_the_device(
    asked: Any, gpu: bool, mode: FlashAttentionMode
) -> None:
    assert flash_attention_mode(Options(path="x", flash_attn=asked), gpu=gpu) == mode


def test_a_cache_overrides_its_models_flash_attention() -> None:
    options = Options(path="x", flash_attn="on").for_cache(CacheInfo(64, flash_attn=False))
    assert flash_attention_mode(options, gpu=False) == "off"


def spec(*caches: CacheInfo, **options: Any) -> EngineSpec:
    named = {str(number): info for number, info in enumerate(caches or (CacheInfo(64),))}
    return EngineSpec("m", Options(path="x", **options), named)


def test_flash_attention_is_off_if_it_is_slow() -> None:
    assert loading.resolve_flash_attention(spec(), gpu=False, is_slow=lambda: True).options.flash_attn == "off"
    assert loading.resolve_flash_attention(spec(), gpu=False, is_slow=lambda: False) == spec()


@pytest.mark.parametrize(
    "asked",
    [
        spec(flash_attn="on"),
        spec(CacheInfo(64, flash_attn=True)),
        spec(CacheInfo(64), CacheInfo(64, type_v="q8_0")),
        spec(CacheInfo(64, type_v="f32")),
    ],
)
def test_flash_attention_stays_if_it_is_set_or_values_are_not_fp16(asked: EngineSpec) -> None:
    assert loading.resolve_flash_attention(asked, gpu=False, is_slow=lambda: True) == asked


def test_a_gpu_needs_no_check_for_slow_flash_attention() -> None:
    assert loading.resolve_flash_attention(spec(), gpu=True, is_slow=lambda: pytest.fail("unexpected check")) == spec()


# --- options reach the context ----------------------------------------------------------------------------------------


def spec_of(raw: dict[str, Any], folder: Path) -> EngineSpec:
    (folder / "c.json").write_text(json.dumps(raw))
    config = load_config(folder / "c.json", env={}).config
    return engine_spec(config.router().catalog.models["m"])


def parameters(spec: EngineSpec, cache: str) -> Any:
    return loading.context_parameters(spec.caches[cache], spec.options)


def test_names_of_older_servers_set_layers_window_types_and_flash_attention(tmp_path: Path) -> None:
    model = {
        "model_path": "x.gguf",
        "gguf_n_gpu_layers": 7,
        "gguf_n_ctx": 256,
        "gguf_flash_attn": "auto",
        "gguf_type_k": "q8_0",
        "gguf_type_v": "f32",
    }
    spec = spec_of({"engine": {"models": {"m": model}}}, tmp_path)
    made = parameters(spec, "m")
    assert spec.options.n_gpu_layers == 7
    assert (made.n_ctx, made.flash_attn_type, made.type_k, made.type_v) == (256, -1, 8, 0)


def test_a_cache_overrides_its_models_settings(tmp_path: Path) -> None:
    settings = {"n_threads": 1, "n_batch": 512, "n_ubatch": 128, "flash_attn": False, "cache_type_k": "q8_0"}
    own = {"n_threads": 2, "n_batch": 256, "n_ubatch": 64, "flash_attn": True, "cache_type_v": "q4_0"}
    caches = {"plain": {"model": "m", "n_ctx": 64}, "own": {"model": "m", "n_ctx": 64, **own}}
    spec = spec_of({"models": {"m": {"path": "x.gguf", **settings}}, "caches": caches}, tmp_path)
    plain, over = parameters(spec, "plain"), parameters(spec, "own")
    fields = ("n_threads", "n_batch", "n_ubatch", "flash_attn_type", "type_k", "type_v")
    assert tuple(getattr(plain, name) for name in fields) == (1, 512, 128, 0, 8, 1)
    assert tuple(getattr(over, name) for name in fields) == (2, 256, 64, 1, 8, 2)


def test_an_unknown_kv_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"'q9' is not a type of a KV cache; use one of f32, f16, q4_0"):
        loading.context_parameters(CacheInfo(64, type_k="q9"), Options(path="x.gguf"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has transparent huge pages")
def test_the_weights_are_in_memory_for_which_huge_pages_were_asked() -> None:
    before = advised_bytes()
    model = loading.load_model(model_file(), Options(path=str(model_file())), lambda _: True)
    assert advised_bytes() - before >= 0.8 * model_file().stat().st_size
    lib.llama_model_free(model)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has transparent huge pages")

_MB = 1 << 20


def private_memory(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def advised_bytes() -> int:
    """Of this process: mappings with the kernel's flag `hg`."""
    size = total = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1]) << 10
        elif line.startswith("VmFlags:") and "hg" in line.split():
            total += size
    return total


def test_new_large_buffers_get_huge_pages_and_older_or_small_ones_do_not() -> None:
    older = private_memory(64 * _MB)
    older[:1] = b"x"
    huge_pages, before = HugePages(), advised_bytes()
    small = private_memory(_MB)
    assert huge_pages.request() == 0
    large = private_memory(96 * _MB)
    assert 96 * _MB <= huge_pages.request() <= 97 * _MB, "the kernel may have joined it with the small one"
    assert 96 * _MB <= advised_bytes() - before <= 97 * _MB
    for each in (older, small, large):
        each.close()


def test_a_system_without_proc_gets_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("modelyard.engines.llama_cpp.loading._MAPS", tmp_path / "maps")
    huge_pages = HugePages()
    buffer = private_memory(64 * _MB)
    assert huge_pages.request() == 0
    buffer.close()


def test_kv_types_of_later_releases_are_refused_with_the_version_of_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = Options(path="x.gguf")
    with pytest.raises(InvalidRequest, match=re.escape(f"the library in use is {lib.version}")) as refused:
        loading.context_parameters(CacheInfo(64, type_k="f8_e4m3"), options)
    assert refused.value.code == "option_unsupported"
    monkeypatch.setattr(loading, "_TYPE_NAMES", "print(41, repr(b'q2_0')); print(43, repr(b'fp8_e4m3'))")
    loading._later_type.cache_clear()
    assert loading.context_parameters(CacheInfo(64, type_k="f8_e4m3"), options).type_k == 43
    loading._later_type.cache_clear()


def test_an_option_of_a_later_library_is_refused_with_the_version_in_use() -> None:
    options = Options(path="x.gguf", moe_cache_mb=64)
    if hasattr(lib.llama_context_default_params(), "moe_cache_size"):
        assert loading.context_parameters(CacheInfo(64), options).moe_cache_size == 64 << 20
        return
    with pytest.raises(InvalidRequest, match=f"the library in use is {lib.version}") as refused:
        loading.context_parameters(CacheInfo(64), options)
    assert refused.value.code == "option_unsupported"
