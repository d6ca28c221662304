"""The isolation canary, in short, and that it notices a leak."""

from __future__ import annotations

import pytest

from bench.canary import Canary
from modelyard.engines.llama_cpp import sequences
from modelyard.engines.llama_cpp.sequences import AdapterSet, KvHolder, TokenIds


async def test_keys_and_caches_see_nothing_of_each_other() -> None:
    result = await Canary(seed=3).run(150)
    assert not result.faults
    assert result.reused > 20, "without reuse the canary shows nothing"


async def test_the_canary_notices_reuse_of_another_keys_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(holder: KvHolder, prompt: TokenIds, adapters: AdapterSet, scope: str, session: str | None) -> int:
        return sequences.common_prefix(holder.tokens, prompt)

    monkeypatch.setattr(sequences, "shared_prefix", shared)
    assert any("had not sent there" in fault for fault in (await Canary(seed=3).run(120)).faults)


async def test_the_canary_notices_kv_of_another_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token too many is kept."""
    plain = sequences.common_prefix
    monkeypatch.setattr(sequences, "common_prefix", lambda a, b: min(len(a), len(b), plain(a, b) + 1))
    assert any("differ" in fault for fault in (await Canary(seed=3).run(60)).faults)
