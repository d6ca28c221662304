"""The settings that the optimizer may change; `n_batch` is not one of them."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.engine import AvailableMemory
from modelyard.engines.llama_cpp import binding
from modelyard.engines.llama_cpp.knobs import knobs
from tests.engines.llama_cpp.helpers import UBATCH, answer, running, spec
from tests.engines.reading import ids

LONG = "A long walk along the river. " * 8


async def handed_over(monkeypatch: pytest.MonkeyPatch, n_batch: int) -> tuple[list[int], list[int]]:
    """The sizes of all decodes, and the answer."""
    sizes: list[int] = []
    decode = binding.lib.llama_decode

    def noted(context: Any, batch: Any) -> int:
        sizes.append(batch.n_tokens)
        return int(decode(context, batch))

    with monkeypatch.context() as patched:
        patched.setattr("modelyard.engines.llama_cpp.context.lib.llama_decode", noted)
        async with running(n_batch=n_batch) as engine:
            chunks = ids(await answer(engine, LONG, max_tokens=2))
    return sizes, chunks


async def test_n_batch_does_not_change_the_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = [await handed_over(monkeypatch, n_batch) for n_batch in (UBATCH // 2, 32 * UBATCH)]
    assert small == large
    assert max(small[0]) == UBATCH


def test_n_ubatch_is_a_knob_and_n_batch_is_not() -> None:
    names = {knob.name for knob in knobs(spec(), AvailableMemory(1 << 34), "batch")}
    assert "n_ubatch" in names
    assert "n_batch" not in names
