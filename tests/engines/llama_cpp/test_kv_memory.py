"""The KV of a context: exported, restored and copied on real contexts."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import POINTER, c_float
from typing import Any

import numpy as np
import pytest

from modelyard.core.engine import CacheInfo
from modelyard.engines.llama_cpp import Options, loading
from modelyard.engines.llama_cpp.batch import LlamaBatch
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.kv_memory import KvLayout, KvMemory, kv_layout
from tests.engines.llama_cpp.exact_models import VOCAB, exact_model

INFO = CacheInfo(256, 3)
RUN = np.arange(7, 47, dtype=np.int32)


class Reader:
    """A context without an engine."""

    def __init__(self, model: Any, options: Options) -> None:
        self.raw = loading.create_context(model, "main", INFO, options)
        self.kv = KvMemory(self.raw, INFO.window, kv_layout(INFO, options))
        self._batch = LlamaBatch(64)

    def read(self, sequence: int, ids: Any, start: int = 0) -> Any:
        """The logits after them."""
        self._batch.clear()
        row = self._batch.add(np.asarray(ids, np.int32), start, sequence, last=True)
        assert lib.llama_decode(self.raw, self._batch.raw) == 0
        self.kv.after_decode(0, 0.0)
        found: Any = lib.llama_get_logits_ith(self.raw, row)
        assert isinstance(found, POINTER(c_float))
        return np.ctypeslib.as_array(found, shape=(VOCAB,)).copy()


@pytest.fixture
def readers() -> Iterator[list[Reader]]:
    options = Options(path=str(exact_model()), n_threads=1)
    model = loading.load_model(exact_model(), options, lambda _: True)
    two = [Reader(model, options) for _ in range(2)]
    yield two
    for reader in two:
        lib.llama_free(reader.raw)
    lib.llama_model_free(model)


def test_exported_kv_gives_the_same_logits_in_another_context(readers: list[Reader]) -> None:
    one, other = readers
    one.read(0, RUN)
    data = one.kv.export(0)
    assert data is not None
    assert data.nbytes == one.kv.size(0)
    assert other.kv.restore(2, data)
    assert other.kv.cut(2, np.asarray(RUN, np.int32), len(RUN))
    assert np.allclose(one.read(0, [5], len(RUN)), other.read(2, [5], len(RUN)), atol=1e-3)


def test_invalid_bytes_are_refused(readers: list[Reader]) -> None:
    one, other = readers
    one.read(0, RUN)
    data = one.kv.export(0)
    assert data is not None
    assert not other.kv.restore(0, data[:-10])
    assert not other.kv.restore(0, np.zeros(100, np.uint8))
    other.kv.clear(0)
    assert not other.kv.cut(0, np.zeros(1, np.int32), 1)
    assert np.allclose(one.read(1, RUN), other.read(0, RUN), atol=1e-3), "nothing of them remains"


def test_a_pending_stream_copy_is_neither_exported_nor_overwritten(readers: list[Reader]) -> None:
    kv = readers[0].kv
    readers[0].read(0, RUN)
    before = kv.export(0)
    assert before is not None
    assert kv.copy(kv, 0, 1, "stream")
    assert kv.export(1) is None, "its data is not copied yet"
    assert kv.export(0) is not None
    assert not kv.restore(0, before), "it would be copied"
    assert not kv.restore(1, before), "it would be overwritten"
    assert kv.copy_methods(kv, 1, 2) == kv.copy_methods(kv, 2, 0) == ["stream"]
    readers[0].read(2, [3])
    after = kv.export(1)
    assert after is not None
    assert after.nbytes == before.nbytes
    assert kv.restore(0, before)
    assert kv.copy_methods(kv, 1, 0) == ["stream", "state"]
    logits = [readers[0].read(n, [5], len(RUN)) for n in range(2)]
    assert np.allclose(logits[0], logits[1], atol=1e-3)


def test_in_one_pool_a_prefix_is_copied_at_once_and_its_owner_goes_on() -> None:
    options = Options(path=str(exact_model()), n_threads=1, kv_unified=True)
    model = loading.load_model(exact_model(), options, lambda _: True)
    pool, fresh = Reader(model, options), Reader(model, options)
    pool.read(0, RUN)
    assert pool.kv.copy(pool.kv, 0, 1, "stream")
    assert pool.kv.export(1) is not None, "nothing is pending"
    assert pool.kv.cut(1, RUN, 20)
    other = np.arange(90, 100, dtype=np.int32)
    mixed = pool.read(1, other, 20), pool.read(0, [5], len(RUN))
    expected = fresh.read(0, [*RUN[:20], *other]), fresh.read(1, [*RUN, 5])
    assert np.allclose(mixed, expected, atol=1e-3)
    for reader in (pool, fresh):
        lib.llama_free(reader.raw)
    lib.llama_model_free(model)


def test_the_first_decodes_of_prompts_are_measured(readers: list[Reader]) -> None:
    costs = readers[0].kv.costs
    prior = costs.token
    readers[0].kv.after_decode(1, 0.0)
    assert costs.token == prior
    readers[0].kv.after_decode(64, 0.0)  # began long ago
    slow = costs.token
    assert slow > prior
    readers[0].kv.after_decode(64, float("inf"))
    assert costs.token < slow


@pytest.mark.parametrize(
    ("flash_attn", "expected"), [(None, "on"), (False, "off"), (True, "on"), ("on", "on"), ("auto", "auto")]
)
def test_the_layout_has_the_resolved_settings(flash_attn: Any, expected: str) -> None:
    options = Options(path="x", flash_attn=flash_attn, swa_full=False)
    assert kv_layout(CacheInfo(64, 2, "Q8_0", "f16"), options) == KvLayout("q8_0", "f16", expected, 2, False)
