"""Pictures on their way to vLLM, opened by a stand-in for Pillow: the real one comes with vLLM."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from io import BytesIO
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from modelyard.core.engine import Media, TokenRun
from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.engines.vllm.request import multi_modal_data
from tests.engines.reading import end, read
from tests.engines.vllm.stage import prompt, running


class Bomb(Exception):
    pass


def opened(stream: BytesIO) -> Any:
    data = stream.read()
    if not data.startswith(b"IMG"):
        raise OSError("cannot identify image file")
    side = 100_000 if b"huge" in data else 10
    return SimpleNamespace(width=side, height=side, convert=lambda mode: (mode, data))


@pytest.fixture(autouse=True)
def pillow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    image = ModuleType("PIL.Image")
    image.open, image.DecompressionBombError = opened, Bomb  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "PIL", ModuleType("PIL"))
    monkeypatch.setitem(sys.modules, "PIL.Image", image)
    return


def picture(data: bytes = b"IMG", hash: str = "ab") -> Media:
    return Media("image", hash, data, 0)


def test_text_alone_has_nothing_beside_it() -> None:
    assert multi_modal_data([]) == {}


def test_pictures_go_along_in_order_and_known_by_their_hashes() -> None:
    assert multi_modal_data([picture(b"IMG1", "aa"), picture(b"IMG2", "bb")]) == {
        "multi_modal_data": {"image": [("RGB", b"IMG1"), ("RGB", b"IMG2")]},
        "multi_modal_uuids": {"image": ["aa", "bb"]},
    }


@pytest.mark.parametrize(("data", "words"), [(b"GIF", "cannot be read"), (b"IMGhuge", "too large")])
def test_picture_that_cannot_be_used_is_the_clients_fault(data: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        multi_modal_data([picture(data)])
    assert caught.value.code == "invalid_image"


def test_sound_is_refused() -> None:
    with pytest.raises(Unsupported):
        multi_modal_data([Media("audio", "ab", b"", 0)])


async def test_prompt_with_a_picture_is_vllms_to_prepare() -> None:
    async with running(modalities=("text", "image")) as engine:
        assert engine.info.capabilities.modalities == ("text", "image")
        asked = prompt(parts=(TokenRun(prompt().ids), picture()))
        assert end(await read(engine.generate(asked))).error is None
        assert engine._core is not None
        told = engine._core._llm.asked[-1]["prompt"]
        assert type(told).__name__ == "TokensPrompt"
        assert told["multi_modal_data"] == {"image": [("RGB", b"IMG")]}
        assert told["cache_salt"]


async def test_unreadable_picture_fails_its_job_alone() -> None:
    async with running(modalities=("text", "image")) as engine:
        bad = prompt(parts=(TokenRun(prompt().ids), picture(b"GIF")))
        assert isinstance(end(await read(engine.generate(bad))).error, InvalidRequest)
        assert end(await read(engine.generate(prompt()))).error is None
