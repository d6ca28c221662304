"""The chats of the workbench: each key has its own, and no more of them than its part of the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard import chat_store
from modelyard.chat_store import ChatStore
from modelyard.core.chat import Chat
from modelyard.core.errors import NotFound, TooLarge


async def test_a_key_stores_no_more_than_its_part_and_reads_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_store, "_MAX_BYTES", 3000)
    store = ChatStore(tmp_path / "chats.sqlite")
    try:
        first = await store.put("eve", Chat(id="first", title="x" * 2000))
        with pytest.raises(TooLarge, match="delete some"):
            await store.put("eve", Chat(id="second", title="x" * 2000))
        await store.put("eve", first)  # changed, not added
        await store.put("ann", Chat(id="second", title="x" * 2000))
        with pytest.raises(NotFound):
            await store.get("ann", "first")
        await store.delete("eve", "first")
        await store.put("eve", Chat(id="second", title="x" * 2000))
    finally:
        await store.close()
