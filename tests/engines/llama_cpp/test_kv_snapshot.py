"""Snapshots as bytes: they round-trip, and damaged or foreign files are refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from modelyard.engines.llama_cpp import kv_snapshot
from modelyard.engines.llama_cpp.kv_memory import KvLayout
from modelyard.engines.llama_cpp.kv_snapshot import (
    _HEAD,
    _SAMPLE,
    KvOrigin,
    KvSnapshot,
    SnapshotHeader,
    SnapshotMismatch,
    decode_snapshot,
    encode_snapshot,
    file_identity,
    hash_session,
    origin_differences,
    sample_offsets,
)
from modelyard.engines.llama_cpp.sequences import Checkpoint

ORIGIN = KvOrigin("0.3.36", "ab12", "main", 512, KvLayout("f16", "f16", "off", 2, True), {"rope_freq_scale": 0.5})
IMAGE = KvSnapshot(
    np.arange(40, dtype=np.int32),
    np.arange(200, dtype=np.uint8),
    (Checkpoint(8, np.full(7, 3, np.uint8)), Checkpoint(32, np.full(9, 4, np.uint8))),
    "5e55",
    (("law", 0.5),),
    "background",
    (("law", 0.25, "cd34"),),
    "ann",
)


def written(image: KvSnapshot = IMAGE) -> bytes:
    return b"".join(bytes(piece) for piece in encode_snapshot(ORIGIN, image))


def read(data: bytes, check: Any = lambda head: None) -> KvSnapshot:
    return decode_snapshot(io.BufferedReader(io.BytesIO(data)), len(data), check)


def alike(one: KvSnapshot, other: KvSnapshot) -> bool:
    same = [(a.tokens, a.data.tolist()) for a in one.checkpoints] == [
        (b.tokens, b.data.tolist()) for b in other.checkpoints
    ]
    plain = all(
        getattr(one, name) == getattr(other, name)
        for name in ("session", "adapters", "priority", "adapter_versions", "scope")
    )
    return same and plain and np.array_equal(one.tokens, other.tokens) and np.array_equal(one.state, other.state)


def test_a_snapshot_round_trips() -> None:
    assert alike(read(written()), IMAGE)
    bare = KvSnapshot(np.array([5], np.int32), np.array([1], np.uint8))
    assert alike(read(written(bare)), bare)


def test_large_snapshots_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = written()
    monkeypatch.setattr(kv_snapshot, "_PIECE", 16)
    assert len(list(encode_snapshot(ORIGIN, IMAGE))) > 10
    assert written() == whole
    assert alike(read(whole), IMAGE)


def test_the_header_is_checked_before_the_rest_is_read() -> None:
    seen: list[SnapshotHeader] = []

    def check(head: SnapshotHeader) -> None:
        seen.append(head)
        raise SnapshotMismatch("no")

    damaged = written()[:-50] + bytes(50)
    with pytest.raises(SnapshotMismatch, match=r"^no$"):
        read(damaged, check)
    assert (seen[0].origin, seen[0].adapter_versions, seen[0].tokens) == (ORIGIN, IMAGE.adapter_versions, 40)


@given(st.integers(0, len(written()) - 1), st.integers(1, 255))
def test_every_changed_byte_is_detected(place: int, change: int) -> None:
    data = bytearray(written())
    data[place] ^= change
    with pytest.raises(SnapshotMismatch):
        read(bytes(data))


@given(st.integers(0, len(written()) - 1))
def test_every_truncated_file_is_detected(length: int) -> None:
    with pytest.raises(SnapshotMismatch):
        read(written()[:length])


@pytest.mark.parametrize("data", [b"", b"GGUF", bytes(1000), b"MYARD-KV" + b"\xff" * 100, written() + b"x"])
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(SnapshotMismatch):
        read(data)


def test_another_version_is_refused_by_its_number() -> None:
    data = bytearray(written())
    data[8] = 9
    with pytest.raises(SnapshotMismatch, match="has version 9"):
        read(bytes(data))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"release": "0.4"}, "release was 0.4 and is 0.3.36"),
        ({"model": "ff"}, "model was ff and is ab12"),
        ({"cache": "fast"}, "cache was fast and is main"),
        ({"window": 64}, "window was 64 and is 512"),
        ({"layout": replace(ORIGIN.layout, type_k="q8_0")}, "type_k was q8_0 and is f16"),
        ({"layout": replace(ORIGIN.layout, type_v="q8_0")}, "type_v was q8_0 and is f16"),
        ({"layout": replace(ORIGIN.layout, flash_attn="on")}, "flash_attn was on and is off"),
        ({"layout": replace(ORIGIN.layout, streams=1)}, "streams was 1 and is 2"),
        ({"layout": replace(ORIGIN.layout, swa_full=False)}, "swa_full was False and is True"),
        ({"positions": {}}, "rope_freq_scale was None and is 0.5"),
        ({"positions": {"rope_freq_scale": 0.5, "yarn_orig_ctx": 9}}, "yarn_orig_ctx was 9 and is None"),
    ],
)
def test_every_difference_of_the_origin_is_named(change: dict[str, Any], words: str) -> None:
    assert origin_differences(replace(ORIGIN, **change), ORIGIN) == [words]
    assert origin_differences(ORIGIN, ORIGIN) == []


def test_a_session_is_stored_as_a_hash() -> None:
    assert hash_session(None) is None
    assert hash_session("key/talk") == hash_session("key/talk") != hash_session("key2/talk")
    assert "key" not in str(hash_session("key/talk"))


# --- identity of weights ----------------------------------------------------------------------------------------------

SIZE = _HEAD + 3 * _SAMPLE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(SIZE))
    return path


def test_identity_does_not_depend_on_path_and_time(file: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.gguf"
    before = file_identity([file])
    file.rename(moved)
    moved.touch()
    assert file_identity([moved]) == before


@pytest.mark.parametrize("place", [0, _HEAD - 1, _HEAD, _HEAD + 2 * _SAMPLE, SIZE - 1])
def test_identity_depends_on_the_head_and_on_samples(file: Path, place: int) -> None:
    before = file_identity([file])
    data = bytearray(SIZE)
    data[place] = 1
    file.write_bytes(data)
    assert file_identity([file]) != before


def test_identity_depends_on_size_and_parts(file: Path, tmp_path: Path) -> None:
    (tmp_path / "longer.gguf").write_bytes(bytes(SIZE + 1))
    found = [file_identity([file]), file_identity([tmp_path / "longer.gguf"]), file_identity([file, file])]
    assert len(set(found)) == 3


@pytest.mark.parametrize("size", [0, 1, _HEAD, _HEAD + 1, _HEAD + _SAMPLE, SIZE, 1 << 30, 1 << 40])
def test_samples_are_few_and_within_the_file(size: int) -> None:
    found = sample_offsets(size)
    assert len(found) <= 1100
    assert all(_HEAD <= place < size for place in found)
    assert size <= _HEAD or max(found) + _SAMPLE >= size
