"""Images and audio in process: tiny projectors of four kinds, compared with llama-server on the same files."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio

from modelyard import libmtmd
from modelyard.core.engine import CacheInfo, Chunk, End, Media, Prompt, TokenRun
from modelyard.core.errors import ContextOverflow, InvalidRequest, Unsupported
from modelyard.core.request import Constraint, Image, Message, Request, Text
from modelyard.engines import llama_cpp, llama_server
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.engines.llama_cpp.media import Projector
from modelyard.gateway.model import check_capabilities
from modelyard.tokenizer.gguf import GgufTokenizer
from tests.engines.llama_cpp.helpers import GREEDY, chatml, running, shared_loop
from tests.engines.llama_cpp.media_files import as_media, media, picture, require_libmtmd, sound
from tests.engines.llama_cpp.tiny_models import seeing
from tests.engines.llama_server import helpers as server
from tests.engines.reading import accepted, ids, read

Kind = Literal["tiles", "block", "mrope", "audio"]
KINDS: tuple[Kind, ...] = ("tiles", "block", "mrope", "audio")
CACHES = {"main": CacheInfo(512, 2)}
SYSTEM = ("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face")


def files(kind: Kind) -> dict[str, Any]:
    require_libmtmd()
    model, projector = seeing(kind)
    return {"path": str(model), "mmproj": str(projector), "n_ubatch": 64, "n_batch": 64}


@cache
def vocabulary(path: str) -> GgufTokenizer:
    return GgufTokenizer(Path(path))


def of(kind: Kind, seed: int = 1) -> Media:
    return media("audio" if kind == "audio" else "image", seed)


def ask(kind: Kind, shown: Media, question: str = "What is it?", before: str = "Look:", **fields: Any) -> Prompt:
    """The prompt of a user's message with the picture or sound between two texts."""
    tokenizer = vocabulary(files(kind)["path"])
    start, _, end = chatml(SYSTEM, ("user", f"{before}*{question}")).partition("*")
    parts = (TokenRun(tokenizer.encode(start)), shown, TokenRun(tokenizer.encode(end)))
    return Prompt(parts=parts, sampling=GREEDY, max_tokens=8, **fields)


def end(chunks: list[Chunk]) -> End:
    last = chunks[-1]
    assert isinstance(last, End)
    return last


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=KINDS)
async def seen(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Kind, LlamaCppEngine]]:
    async with running(CACHES, **files(request.param)) as engine:
        yield request.param, engine


@shared_loop
async def test_a_second_question_about_the_same_picture_evaluates_only_its_own_tokens(
    seen: tuple[Kind, LlamaCppEngine],
) -> None:
    kind, engine = seen
    first = await read(engine.generate(ask(kind, of(kind, 3))))
    again = ask(kind, of(kind, 3), "How large is it?")
    assert isinstance(again.parts[2], TokenRun)
    second = await read(engine.generate(again))
    fresh = end(second).usage.prompt - accepted(second).cached_tokens
    assert 0 < fresh <= len(again.parts[2].ids)
    assert ids(first)
    assert accepted(second).cached_tokens > len(again.parts[0].ids)  # type: ignore[union-attr]


@shared_loop
async def test_the_answer_depends_on_the_picture_and_another_ones_kv_is_not_used(
    seen: tuple[Kind, LlamaCppEngine],
) -> None:
    kind, engine = seen
    one, other = ask(kind, of(kind, 1)), ask(kind, of(kind, 2))
    first = await read(engine.generate(one))
    second = await read(engine.generate(other))
    assert accepted(second).cached_tokens <= len(one.parts[0].ids) + 8  # type: ignore[union-attr] its marks are text
    assert ids(first) != ids(second)
    assert ids(first) == ids(await read(engine.generate(one)))


@shared_loop
async def test_its_tokens_are_counted_as_they_are_evaluated_before_and_after_loading(
    seen: tuple[Kind, LlamaCppEngine],
) -> None:
    kind, engine = seen
    shown = of(kind)
    prompt = ask(kind, shown)
    used = end(await read(engine.generate(prompt))).usage.prompt
    assert [used - len(prompt.ids)] == await engine.count_media([shown])
    assert [used - len(prompt.ids)] == llama_cpp.count_media(engine.spec.options, [shown])


@shared_loop
async def test_what_cannot_be_read_is_refused(seen: tuple[Kind, LlamaCppEngine]) -> None:
    kind, engine = seen
    right: Literal["image", "audio"] = "audio" if kind == "audio" else "image"
    wrong: Literal["image", "audio"] = "image" if kind == "audio" else "audio"
    prompt = ask(kind, of(kind))
    cases: list[tuple[Prompt, type[Exception]]] = [
        (ask(kind, as_media(right, b"no picture at all")), InvalidRequest),
        (ask(kind, as_media(right, (picture(1) if right == "image" else sound(1))[:30])), InvalidRequest),
        (ask(kind, media(wrong)), Unsupported),
        (Prompt(parts=prompt.parts[:2], sampling=GREEDY), InvalidRequest),
        (ask(kind, of(kind), prompt_logprobs=1), Unsupported),
        (ask(kind, of(kind), before="word " * 480), ContextOverflow),
    ]
    for asked, error in cases:
        assert isinstance(end(await read(engine.generate(asked))).error, error)
    assert end(await read(engine.generate(prompt))).error is None


async def test_pictures_of_other_formats_are_read_and_a_huge_one_is_refused_by_its_header() -> None:
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (100_000).to_bytes(4) * 2 + b"\x08\x02\0\0\0"
    async with running(CACHES, **files("block")) as engine:
        for format in ("JPEG", "GIF", "BMP", "WEBP"):
            chunks = await read(engine.generate(ask("block", as_media("image", picture(1, format=format)))))
            assert end(chunks).error is None
        error = end(await read(engine.generate(ask("block", as_media("image", header))))).error
        assert "100000x100000 is too large" in str(error)


async def test_a_known_picture_is_not_encoded_again_in_another_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = counted(monkeypatch)
    async with running(CACHES, **files("tiles")) as engine:
        first = await read(engine.generate(ask("tiles", of("tiles"))))
        tiles = len(encoded)
        assert tiles > 1
        other = await read(engine.generate(ask("tiles", of("tiles"), before="Something else:")))
        assert accepted(other).cached_tokens < end(first).usage.prompt // 2
        assert len(encoded) == tiles


async def test_after_a_restart_a_known_picture_is_neither_encoded_nor_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = counted(monkeypatch)
    options = files("mrope") | {"kv_store": str(tmp_path)}
    async with running(CACHES, **options) as engine:
        first = await read(engine.generate(ask("mrope", of("mrope"))))
    tiles = len(encoded)
    async with running(CACHES, **options) as engine:
        again = await read(engine.generate(ask("mrope", of("mrope"))))
        assert end(again).usage.cached == end(first).usage.prompt - 1
        assert engine.stats().evaluated_tokens == 1
    assert ids(again) == ids(first)
    assert len(encoded) == tiles


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys of all chunks that are encoded from now on."""
    encoded: list[bytes] = []
    encode = Projector.encode
    monkeypatch.setattr(Projector, "encode", lambda self, chunk: encoded.append(chunk.key) or encode(self, chunk))
    return encoded


async def test_streams_go_on_while_a_picture_is_encoded_and_its_job_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, release, encode = threading.Event(), threading.Event(), Projector.encode

    def slow(self: Projector, chunk: Any) -> Any:
        started.set()
        release.wait(60)
        return encode(self, chunk)

    monkeypatch.setattr(Projector, "encode", slow)
    async with running(CACHES, **files("block")) as engine:
        waiting = engine.generate(ask("block", of("block")))
        await asyncio.to_thread(started.wait, 60)
        text = Prompt(parts=ask("block", of("block")).parts[::2], sampling=GREEDY, max_tokens=4)
        assert len(ids(await read(engine.generate(text)))) == 4
        waiting.cancel()
        assert end(await read(waiting)).reason == "cancelled"
        assert engine.stats().running == 0
        release.set()
        assert end(await read(engine.generate(ask("block", of("block"))))).error is None


async def test_a_picture_that_is_read_slowly_delays_no_grammar_and_no_other_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_parts, first, may_go_on = Projector.read, threading.Event(), threading.Event()

    def read_slowly(self: Projector, parts: Any) -> Any:
        if not first.is_set():
            first.set()
            may_go_on.wait(60)
        return read_parts(self, parts)

    monkeypatch.setattr(Projector, "read", read_slowly)
    grammar = Constraint("regex", "(yes|no)")
    async with running({"main": CacheInfo(512, 3)}, **files("tiles")) as engine:
        slow = engine.generate(ask("tiles", of("tiles")))
        await asyncio.to_thread(first.wait, 60)
        text = vocabulary(files("tiles")["path"]).encode("Is it red?")
        bound = Prompt(parts=(TokenRun(text),), sampling=GREEDY, max_tokens=8, constraint=grammar)
        assert end(await read(engine.generate(bound))).error is None
        assert end(await read(engine.generate(ask("tiles", of("tiles", 2), constraint=grammar)))).error is None
        may_go_on.set()
        assert end(await read(slow)).error is None


async def test_a_chunk_that_is_read_at_once_needs_a_micro_batch_of_its_size() -> None:
    async with running(CACHES, **files("block") | {"n_ubatch": 2}) as engine:
        error = end(await read(engine.generate(ask("block", of("block"))))).error
        assert "set n_ubatch to 4 or more" in str(error)


async def test_a_projector_of_another_model_is_refused_if_it_is_configured(tmp_path: Path) -> None:
    broken = tmp_path / "mmproj.gguf"
    broken.write_bytes(b"GGUF no projector")
    with pytest.raises(InvalidRequest, match=r"mmproj\.gguf cannot be loaded"):
        async with running(CACHES, **files("block") | {"mmproj": str(broken)}):
            pass


async def test_a_projector_beside_the_model_is_found_and_a_foreign_one_is_passed_over(tmp_path: Path) -> None:
    paths = files("block")
    model = tmp_path / "model.gguf"
    model.symlink_to(paths["path"])
    (tmp_path / "mmproj-F16.gguf").symlink_to(paths["mmproj"])
    beside = paths | {"path": str(model), "mmproj": None}
    assert llama_cpp.capabilities(llama_cpp.Options(**beside)).modalities == ("text", "image")
    async with running(CACHES, **beside) as engine:
        assert engine.info.capabilities.modalities == ("text", "image")
    async with running(CACHES, **beside | {"mmproj": False}) as engine:
        assert engine.info.capabilities.modalities == ("text",)
    (tmp_path / "mmproj-F16.gguf").unlink()
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF no projector")
    async with running(CACHES, **beside) as engine:
        assert engine.info.capabilities.modalities == ("text",)


def request_of(shown: Media) -> Request:
    url = f"data:image/png;base64,{base64.b64encode(shown.data).decode()}"
    parts = (Text("Look:"), Image(url), Text("What is it?"))
    return Request(model="m", messages=(Message("user", parts),), sampling=GREEDY, max_tokens=8)


@pytest.mark.parametrize("kind", ["tiles", "block", "mrope"])
async def test_it_generates_the_same_as_llama_server_from_as_many_tokens(kind: Kind) -> None:
    shown, paths = of(kind), files(kind)
    async with running(CACHES, **paths) as engine:
        own = await read(engine.generate(ask(kind, shown)))
    tokenizer = vocabulary(paths["path"])
    options = {"path": paths["path"], "llama_server_mmproj_path": paths["mmproj"]}
    text, usage, counted = await server.answer(request_of(shown), **options)
    assert (tokenizer.decode(ids(own)), end(own).usage.prompt) == (text, usage.prompt)
    assert counted == usage.prompt, "its own count, while it runs"
    marks = end(own).usage.prompt - len(ask(kind, shown).ids)
    assert llama_server.count_media(llama_server.Options(**options), [shown]) == [marks], "and before it runs"


def test_an_image_to_a_model_that_lacks_libmtmd_says_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libmtmd, "find_library", lambda folder=None: None)
    model, projector = seeing("block")
    found = llama_cpp.capabilities(llama_cpp.Options(path=str(model), mmproj=str(projector)))
    assert found.modalities == ("text",)
    with pytest.raises(Unsupported, match=r"takes text only.*libmtmd.*`modelyard setup --media` compiles it"):
        check_capabilities(Request(model="m", messages=()), found, "m", media=("image",))
