"""KV that outlives an engine: restored if everything agrees, ignored otherwise; and the folder of its files."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from shutil import copyfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from modelyard.core.engine import CacheInfo, Chunk, Control, Tokens
from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.engines.llama_cpp import Options, kv_store, sequences
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.engines.llama_cpp.kv_memory import KvLayout
from modelyard.engines.llama_cpp.kv_snapshot import KvOrigin, KvSnapshot
from modelyard.engines.llama_cpp.kv_store import SnapshotFolder, store_folder
from modelyard.library.cache_dir import cache_dir
from tests.engines.llama_cpp import helpers
from tests.engines.llama_cpp.exact_models import (
    VOCAB,
    exact_model,
    hybrid_model,
    other_model,
    recurrent_model,
    sliding_model,
)
from tests.engines.llama_cpp.helpers import chatml, id_prompt, running, text_of
from tests.engines.llama_cpp.lora_files import write_lora
from tests.engines.reading import ROUNDED, accepted, assert_alike, end, ids, read, until

CACHES = {"main": CacheInfo(512, 2), "fast": CacheInfo(512, 2)}
Model = Callable[[], Path]


def words(seed: int, count: int = 60) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(count)]


RUN = words(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@asynccontextmanager
async def opened(
    folder: Path | None, caches: dict[str, CacheInfo] | None = None, **options: Any
) -> AsyncIterator[LlamaCppEngine]:
    chosen = {"path": str(exact_model()), "flash_attn": True} | options
    async with running(caches or CACHES, kv_store=str(folder) if folder else False, **chosen) as engine:
        yield engine


async def answer(engine: LlamaCppEngine, run: list[int] = RUN, **fields: Any) -> list[Chunk]:
    return await read(engine.generate(id_prompt(run, **fields)))


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


# --- restored ---------------------------------------------------------------------------------------------------------


async def test_a_conversation_on_the_real_model_continues_after_a_restart(folder: Path) -> None:
    async def turn(engine: LlamaCppEngine, *turns: tuple[str, str]) -> list[Chunk]:
        return await helpers.answer(engine, chatml(*turns), session="key/talk", max_tokens=10)

    caches = {"main": CacheInfo(256, 2)}
    first = ("user", "My name is Ada and I like the sea. What is my name?")
    async with running(caches, kv_store=str(folder)) as engine:
        before = await turn(engine, first)
    more = [first, ("assistant", text_of(before)), ("user", "And what do I like?")]
    async with running(caches, kv_store=str(folder)) as engine:
        assert engine.stats().restored_tokens == engine.stats().occupied_tokens > 0
        after = await turn(engine, *more)
    async with running(caches) as engine:
        await turn(engine, first)
        expected = await turn(engine, *more)
    assert accepted(after) == accepted(expected)
    assert accepted(after).cached_tokens >= len(helpers.prompt(chatml(first)).ids)
    assert_alike(after, expected, ROUNDED)


@pytest.mark.parametrize("model", [exact_model, sliding_model, recurrent_model, hybrid_model])
@pytest.mark.parametrize("either", [True, False])
async def test_every_kind_of_model_continues_after_a_restart(model: Model, either: bool, folder: Path) -> None:
    same = {"path": str(model()), "swa_full": either, "flash_attn": either}
    async with opened(folder, **same) as engine:
        first = await answer(engine, session="a")
    turn = RUN + ids(first) + words(2, 20)
    async with opened(folder, **same) as engine:
        chunks = await answer(engine, turn, session="a")
        held = [one.tokens for one in engine._caches["main"].slots[0].checkpoints]
    assert accepted(chunks).cached_tokens == len(RUN) + len(ids(first)) - 1
    if held:
        assert held[0] == len(RUN) - 8, "its checkpoints were saved with it"
    async with opened(None, **same) as engine:
        assert_alike(chunks, await answer(engine, turn))


async def test_caches_sessions_and_order_of_use_are_restored(folder: Path) -> None:
    async with opened(folder) as engine:
        for n, (session, cache) in enumerate([("a", "main"), ("b", "main"), (None, "fast")]):
            await answer(engine, words(n), session=session, cache=cache, priority="background" if n else "main")
        held = _held(engine)
    async with opened(folder) as engine:
        assert _held(engine) == held
        assert accepted(await answer(engine, words(7), session="a")).cached_tokens == 0
        assert (
            accepted(await answer(engine, words(0), session="a")).cached_tokens == len(words(0)) - 1
        )  # not background


def _held(engine: LlamaCppEngine) -> list[tuple[Any, ...]]:
    caches = engine._caches.values()
    by_use = [
        slot for cache in caches for slot in sorted(cache.slots, key=lambda slot: slot.use_order) if len(slot.tokens)
    ]
    return [(slot.session, slot.priority, slot.adapters, slot.tokens.tolist()) for slot in by_use]


async def test_session_names_are_not_stored(folder: Path) -> None:
    async with opened(folder) as engine:
        await answer(engine, session="sk-secret/talk")
    assert all(b"sk-secret" not in file.read_bytes() for file in files(folder))


async def test_only_changed_sequences_are_written_and_replace_their_files(folder: Path) -> None:
    async with opened(folder) as engine:
        first = await answer(engine, session="a")
        await answer(engine, words(2), session="b")
    before = files(folder)
    async with opened(folder) as engine:
        await answer(engine, RUN + ids(first) + words(3), session="a")
    after = files(folder)
    assert len(before) == len(after)
    assert len(set(before) & set(after)) == len(before) - 1


@pytest.mark.parametrize("edited", [RUN, RUN[:40] + words(5, 20)])
async def test_an_edited_conversation_replaces_its_file(edited: list[int], folder: Path) -> None:
    """Also if its length is the same."""
    async with opened(folder) as engine:
        await answer(engine, session="a")
    (before,) = files(folder)
    async with opened(folder) as engine:
        await answer(engine, edited, session="a")
    (after,) = files(folder)
    assert before != after
    async with opened(folder) as engine:
        assert accepted(await answer(engine, edited, session="a")).cached_tokens == len(edited) - 1


async def test_an_evicted_conversation_keeps_its_file(folder: Path) -> None:
    caches = {"main": CacheInfo(512, 1)}
    async with opened(folder, caches) as engine:
        await answer(engine, session="a")
    async with opened(folder, caches) as engine:
        chunks = await answer(engine, RUN[:30] + words(2), session="b")
        assert accepted(chunks).evicted
        assert accepted(chunks).cached_tokens == 30
    assert len(files(folder)) == 2


async def test_a_running_job_is_saved_up_to_its_last_step(folder: Path) -> None:
    async with opened(folder) as engine:
        job = engine.generate(id_prompt(RUN, session="a", max_tokens=200))
        chunks = await until(job, Tokens)
    spoken = ids(chunks + await read(job))
    async with opened(folder) as engine:
        kept = accepted(await answer(engine, RUN + spoken + words(2), session="a")).cached_tokens
    assert len(RUN) <= kept == len(RUN) + len(spoken) - 1


async def test_an_engine_that_died_saves_nothing(folder: Path) -> None:
    async with opened(folder) as engine:
        await answer(engine)
        engine._contexts[0].step = _explode  # type: ignore[method-assign]
        assert end(await answer(engine)).error is not None
    assert files(folder) == []


def _explode() -> None:
    raise ValueError("no more")


async def test_the_engine_closes_even_if_saving_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_store.KvStore, "save_all", lambda *_: _explode())
    async with opened(folder) as engine:
        await answer(engine)
    assert "was not saved" in caplog.text


async def test_nothing_is_saved_without_kv_store(folder: Path) -> None:
    async with opened(None) as engine:
        await answer(engine)
        with pytest.raises(InvalidRequest, match="kv_store"):
            await engine.control(Control("restore"))
    assert files(folder) == []


# --- ignored ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param({"path": "other"}, "model was", id="other weights of the same shape"),
        pytest.param({"main": CacheInfo(256, 2)}, "window was 512 and is 256", id="window"),
        pytest.param({"main": CacheInfo(512, 3)}, "streams was 4 and is 5", id="parallel"),
        pytest.param({"main": CacheInfo(512, 2, type_k="f32")}, "type_k was f16 and is f32", id="type_k"),
        pytest.param({"main": CacheInfo(512, 2, type_v="f32")}, "type_v was f16 and is f32", id="type_v"),
        pytest.param({"flash_attn": False}, "flash_attn was on and is off", id="flash attention"),
        pytest.param({"swa_full": True}, "swa_full was False and is True", id="swa_full"),
        pytest.param({"rope_freq_scale": 0.5}, "rope_freq_scale was None and is 0.5", id="RoPE scaling"),
    ],
)
async def test_kv_that_does_not_fit_is_ignored_with_the_difference(
    changed: dict[str, Any], message: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(folder) as engine:
        await answer(engine, session="a")
    (file,) = files(folder)
    caches = CACHES | {"main": changed.pop("main")} if "main" in changed else CACHES
    options = {"path": str(other_model())} if "path" in changed else changed
    async with opened(folder, caches, **options) as engine:
        assert engine.stats().restored_tokens == 0
        chunks = await answer(engine, session="a")
        assert f"the saved KV in {file} is ignored: " in caplog.text
        assert message in caplog.text
    assert accepted(chunks).cached_tokens == 0
    assert file.exists()


async def test_kv_of_another_release_is_ignored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(folder) as engine:
        await answer(engine)
    identity = kv_store.lib.identity
    monkeypatch.setattr(kv_store.lib, "identity", "libllama.v9.9.so 1")
    async with opened(folder) as engine:
        assert engine.stats().restored_tokens == 0
    assert f"release was {identity} and is libllama.v9.9.so 1" in caplog.text


LAW = (("law", 1.0),)


@pytest.mark.parametrize("change", ["file", "scale", "gone", "nothing"])
async def test_kv_with_an_adapter_is_restored_only_with_the_same_adapter(
    change: str, folder: Path, tmp_path: Path
) -> None:
    law = write_lora(tmp_path / "law.gguf", width=64, layers=2, seed=1, strength=0.3)
    async with opened(folder, lora={"law": str(law)}) as engine:
        await answer(engine, adapters=LAW, session="a")
    if change == "file":
        write_lora(law, width=64, layers=2, seed=2, strength=0.3)
    lora = {"law": {"path": str(law), "scale": 0.5 if change == "scale" else 1.0}} if change != "gone" else {}
    async with opened(folder, lora=lora) as engine:
        assert (engine.stats().restored_tokens > 0) == (change == "nothing")
        plain = await answer(engine, session="a")
    assert accepted(plain).cached_tokens == 0


@pytest.mark.parametrize("place", [0, 10, 40, -200, -1])
async def test_a_damaged_file_is_ignored(place: int, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(folder) as engine:
        first = await answer(engine, session="a")
    (file,) = files(folder)
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    async with opened(folder) as engine:
        assert engine.stats().restored_tokens == 0
        assert "is ignored" in caplog.text
        assert_alike(await answer(engine, session="a"), first)


async def test_truncated_and_foreign_files_are_ignored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(folder) as engine:
        await answer(engine, session="a")
    (file,) = files(folder)
    whole = file.read_bytes()
    for n, data in enumerate([b"", whole[:100], whole[:-1], bytes(5000)]):
        file.with_name(f"{file.stem[:-1]}{n}x.kv").write_bytes(data)
    async with opened(folder) as engine:
        assert engine.stats().restored_tokens > 0, "valid files are still restored"
    assert caplog.text.count("is ignored") == 4


async def test_state_that_llama_cpp_refuses_is_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(folder) as engine:
        await answer(engine, session="a")
    with monkeypatch.context() as patched:
        patched.setattr("modelyard.engines.llama_cpp.kv_memory.lib.llama_state_seq_set_data_ext", lambda *_: 0)
        async with opened(folder) as engine:
            assert engine.stats().occupied_tokens == 0
            assert accepted(await answer(engine, session="a")).cached_tokens == 0


async def test_a_moved_model_file_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    async with opened(folder) as engine:
        await answer(engine, session="a")
    copyfile(exact_model(), moved := tmp_path / "moved.gguf")
    async with opened(folder, path=str(moved)) as engine:
        assert engine.stats().restored_tokens > 0


# --- while the engine runs --------------------------------------------------------------------------------------------


async def test_save_and_restore_by_control(folder: Path) -> None:
    async with opened(folder) as engine:
        chunks = [await answer(engine, session="a", cache=cache) for cache in CACHES]
        await engine.control(Control("save", "main"))
        assert len(files(folder)) == 1
        await engine.control(Control("evict"))
        await engine.control(Control("restore"))
        again = [await answer(engine, session="a", cache=cache) for cache in CACHES]
        assert [accepted(one).cached_tokens for one in again] == [len(RUN) - 1, 0]
        with pytest.raises(NotFound):
            await engine.control(Control("save", "huge"))
    for one, other in zip(chunks, again, strict=True):
        assert_alike(one, other)


async def test_saving_does_not_affect_streams(folder: Path) -> None:
    async with opened(folder) as engine:
        stream = engine.generate(id_prompt(RUN, session="a", max_tokens=100))
        chunks = await until(stream, Tokens)
        for _ in range(5):
            await engine.control(Control("save"))
        chunks += await read(stream)
        assert len(files(folder)) == 1, "the newer file replaces the older"
    async with opened(None) as engine:
        assert_alike(chunks, await answer(engine, max_tokens=100))


async def test_restoring_evicts_nothing_and_restores_nothing_twice(folder: Path) -> None:
    caches = {"main": CacheInfo(512, 2)}
    async with opened(folder, caches) as engine:
        await answer(engine, words(1), session="a")
        await engine.control(Control("save"))
        await engine.control(Control("restore"))
        assert engine.stats().restored_tokens == 0, "it is in the cache"
        await engine.control(Control("evict"))
        for n in (2, 3):
            await answer(engine, words(n), session=str(n))
        await engine.control(Control("restore"))
        assert engine.stats().restored_tokens == 0, "there is no room"
        assert accepted(await answer(engine, words(2), session="2")).cached_tokens == len(words(2)) - 1


async def test_an_aborted_load_stops_restoring(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(folder) as engine:
        await answer(engine, session="a")
    read_: list[Path] = []
    monkeypatch.setattr(kv_store.KvStore, "_read", lambda self, cache, file: read_.append(file))
    async with opened(folder) as engine:
        engine._stop_error = InvalidRequest("aborted")
        assert engine._kv_store is not None
        read_.clear()
        await asyncio.to_thread(
            engine._kv_store.restore_all, engine._caches.values(), lambda: engine._stop_error is None
        )
        assert read_ == []
        engine._stop_error = None


async def test_the_log_reports_saved_and_restored_tokens(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, kv_store.__name__)
    async with opened(folder) as engine:
        await answer(engine)
    async with opened(folder):
        pass
    assert "saved KV of 67 tokens of the cache 'main'" in caplog.text
    assert "restored KV of 67 tokens of the cache 'main'" in caplog.text


async def test_parked_conversations_continue_after_a_restart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worthwhile = "modelyard.engines.llama_cpp.sequences.is_copy_worthwhile"
    monkeypatch.setattr(worthwhile, lambda saved, moved, costs: saved >= 8)
    talks, held = [words(n, 60) for n in range(1, 5)], [0] * 4
    for _ in range(3):
        async with opened(folder, {"main": CacheInfo(512, 1)}) as engine:
            for n, talk in enumerate(talks):
                chunks = await answer(engine, talk)
                assert accepted(chunks).cached_tokens == held[n]
                talks[n], held[n] = talk + ids(chunks) + words(9, 20), len(talk) + len(ids(chunks)) - 1
            assert len(engine._caches["main"].parked_only) == 3
        assert len(files(folder)) == 4, "the later state of a conversation replaces the earlier one"


def test_by_default_conversations_of_some_length_are_saved_unless_the_environment_forbids_it() -> None:
    assert store_folder(Options(path="x"), {}) == cache_dir() / "kv"
    assert store_folder(Options(path="x"), {"MODELYARD_KV_STORE": "off"}) is None
    assert store_folder(Options(path="x", kv_store=False), {}) is None


def test_a_disk_that_is_nearly_full_gets_no_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    assert snapshot_folder(tmp_path).write(ORIGIN, snapshot()) is None
    assert "the disk has 1024 MiB left" in caplog.text


def test_kv_store_is_a_folder_or_true() -> None:
    assert store_folder(Options(path="x", kv_store=True)) == cache_dir() / "kv"
    assert store_folder(Options(path="x", kv_store="~/kv")) == Path.home() / "kv"


# --- the folder -------------------------------------------------------------------------------------------------------

ORIGIN = KvOrigin("0.3.36", "ab12", "main", 512, KvLayout("f16", "f16", "off", 2, True), {})


def snapshot(size: int = 100, count: int = 10) -> KvSnapshot:
    return KvSnapshot(np.arange(count, dtype=np.int32), np.zeros(size, np.uint8))


def snapshot_folder(folder: Path, limit: int = 1 << 20, model: str = "m") -> SnapshotFolder:
    return SnapshotFolder(folder / "kv", model, limit)


def write(where: SnapshotFolder, **fields: Any) -> Path:
    file = where.write(ORIGIN, snapshot(**fields))
    assert file is not None
    return Path(file)


def test_files_are_listed_by_cache_with_the_newest_first(tmp_path: Path) -> None:
    made = [write(where := snapshot_folder(tmp_path)) for _ in range(3)]
    assert where.files("main") == made[::-1]
    assert where.files("mai") == where.files("main2") == []
    assert snapshot_folder(tmp_path, model="other").files("main") == []
    assert where.touch(str(made[0]))
    assert where.files("main")[0] == made[0]
    made[1].unlink()
    assert not where.touch(str(made[1]))


def test_similar_names_have_different_folders(tmp_path: Path) -> None:
    assert snapshot_folder(tmp_path, model="a/b").folder != snapshot_folder(tmp_path, model="a_b").folder
    assert snapshot_folder(tmp_path, model="../../etc").folder.parent == tmp_path / "kv"
    assert snapshot_folder(tmp_path, model="..").folder.parent.resolve() == tmp_path / "kv"


def test_files_are_private(tmp_path: Path) -> None:
    file = write(snapshot_folder(tmp_path))
    assert file.stat().st_mode & 0o077 == 0
    assert file.parent.stat().st_mode & 0o077 == 0


def test_the_oldest_files_of_all_models_are_deleted_first(tmp_path: Path) -> None:
    other = write(snapshot_folder(tmp_path, model="other"), size=1000)
    where = snapshot_folder(tmp_path, limit=5000)
    made = [write(where, size=1000) for _ in range(6)]
    assert not other.exists()
    left = where.files("main")
    assert left == made[: -len(left) - 1 : -1]
    assert 2 <= len(left) <= 4
    assert sum(file.stat().st_size for file in left) <= 5000


def test_a_snapshot_larger_than_the_limit_is_not_saved_and_deletes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = write(where := snapshot_folder(tmp_path, limit=2000))
    assert where.write(ORIGIN, snapshot(size=3000)) is None
    assert small.exists()
    assert "kv_store_mb" in caplog.text


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = snapshot_folder(tmp_path)

    def broken() -> Iterator[bytes]:
        yield b"half"
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        where._write(10, broken(), "main.x-1")
    assert list(where.folder.iterdir()) == []
    (tmp_path / "file").touch()
    assert SnapshotFolder(tmp_path / "file", "m", 1 << 20).write(ORIGIN, snapshot()) is None
    assert "cannot be saved" in caplog.text


def test_partial_files_of_dead_processes_are_deleted(tmp_path: Path) -> None:
    where = snapshot_folder(tmp_path)
    where.folder.mkdir(parents=True)
    dead, mine, odd = (where.folder / f"x.{pid}.part" for pid in (2**22 + 1, os.getpid(), "odd"))
    for part in (dead, mine, odd):
        part.touch()
    write(where)
    assert [part.exists() for part in (dead, mine, odd)] == [False, True, True]


def test_a_file_that_does_not_fit_stays_and_the_log_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(where := snapshot_folder(tmp_path))
    assert where.read(file, ORIGIN, lambda adapters: ()) is not None
    assert where.read(file, replace(ORIGIN, release="0.4"), lambda adapters: ()) is None
    assert f"the saved KV in {file} is ignored: release was 0.3.36 and is 0.4" in caplog.text
    assert where.read(file, ORIGIN, lambda adapters: (("law", 1.0, "x"),)) is None
    assert "adapters were () and are (('law', 1.0, 'x'),)" in caplog.text
    assert where.read(file.with_name("gone.kv"), ORIGIN, lambda adapters: ()) is None
    assert file.exists()


def test_large_files_log_their_progress(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_store, "_PROGRESS_BYTES", 1000)
    caplog.set_level(logging.INFO, kv_store.__name__)
    write(snapshot_folder(tmp_path), size=4000)
    assert "saving KV to" in caplog.text


# --- files that have no room in memory --------------------------------------------------------------------------------


async def test_a_conversation_that_is_only_in_a_file_goes_on_from_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four were saved. Memory has room for two in sequences and one that is parked, so that they take turns."""
    monkeypatch.setattr(sequences, "is_copy_worthwhile", lambda saved, moved, costs: saved > 0)
    caches = {"main": CacheInfo(2048, 2)}
    talks = {name: words(seed, 1500) for seed, name in enumerate("abcd")}
    async with opened(folder, caches, parked_mb=64) as engine:
        for name, talk in talks.items():
            await answer(engine, talk, session=name)
    assert len(files(folder)) == 4
    async with opened(folder, caches, parked_mb=1) as engine:
        assert _where(engine) == ["live", "live", "parked", "stored"]
        found = [await answer(engine, [*talks[name], *words(9, 20)], session=name) for name in "ababcd"]
        assert [accepted(chunks).cached_tokens >= 1500 for chunks in found] == [True] * 6
    async with opened(None, caches) as engine:
        assert_alike(found[0], await answer(engine, [*talks["a"], *words(9, 20)]))


async def test_a_stored_file_that_is_gone_costs_the_reading_of_the_prompt_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "is_copy_worthwhile", lambda saved, moved, costs: saved > 0)
    caches = {"main": CacheInfo(2048, 1)}
    async with opened(folder, caches, parked_mb=64) as engine:
        for seed in range(3):
            await answer(engine, words(seed, 1500), session=str(seed))
    async with opened(folder, caches, parked_mb=1) as engine:
        (leaf,) = engine._caches["main"].stored
        await asyncio.to_thread(Path(leaf.file).unlink)
        chunks = await answer(engine, leaf.tokens.tolist(), session="other")
        assert (end(chunks).reason, accepted(chunks).cached_tokens) == ("length", 0)
        assert leaf not in engine._caches["main"].stored


def _where(engine: LlamaCppEngine) -> list[str]:
    tree = engine.stats().caches["main"].prefixes
    return sorted("live" if leaf.id is not None else "stored" if leaf.stored else "parked" for leaf in tree)


def test_the_files_that_a_client_names_are_its_own_and_leave_room_for_those_of_others(tmp_path: Path) -> None:
    where = snapshot_folder(tmp_path, limit=16_000)
    names = [kv_store.file_stem("ann", str(number)) for number in range(9)]
    bobs = where.write(ORIGIN, snapshot(size=1000), kv_store.file_stem("bob", "1"))
    kept = write(where, size=1000)
    made = [where.write(ORIGIN, snapshot(size=1000), name) for name in names]
    assert bobs is not None
    assert Path(bobs).exists()
    assert kept.exists()
    assert where.files("main") == [kept]  # a client asks for its own files
    left = [Path(file) for file in made if file is not None and Path(file).exists()]
    assert left == [Path(file) for file in made if file is not None][-len(left) :]
    assert 1 <= len(left) < 4  # a quarter of the room
    assert kv_store.file_stem("ann", "1") != kv_store.file_stem("bob", "1") != kv_store.file_stem("an", "n1")
