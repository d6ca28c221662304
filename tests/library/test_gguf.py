from __future__ import annotations

import io
import struct
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.errors import InvalidRequest
from modelyard.engines.llama_cpp.model_shape import read_model_shape
from modelyard.engines.llama_cpp.selftest import write_tiny_model
from modelyard.library.gguf import (
    GgufSummary,
    ModelPurpose,
    model_purpose,
    read_contents,
    read_metadata,
    read_purpose,
    read_summary,
    without_tensors,
)
from tests.engines.llama_cpp import tiny_models
from tests.library.files import gguf_bytes, number, text, write_gguf


def test_the_summary_has_architecture_parameters_quantization_and_context(tmp_path: Path):
    file = write_gguf(tmp_path / "a.gguf")
    assert read_summary(file) == GgufSummary("toy", "", 600, "Q4_K_M", 512, 2, file.stat().st_size)


def test_the_summary_covers_all_parts_of_a_split_model(tmp_path: Path):
    first, second = (write_gguf(tmp_path / f"m-0000{n}-of-00002.gguf") for n in (1, 2))
    about = read_summary(first)
    assert (about.parameters, about.size) == (1200, first.stat().st_size + second.stat().st_size)


def test_an_unknown_quantization_is_empty(tmp_path: Path):
    assert read_summary(write_gguf(tmp_path / "a.gguf", quant=999)).quant == ""


def test_an_invalid_or_truncated_file_is_an_error(tmp_path: Path):
    for data in (b"", b"GGUF", b"GGML" + b"\0" * 40, gguf_bytes()[:100], b"PK\x03\x04" * 20):
        (tmp_path / "a.gguf").write_bytes(data)
        for read in (read_summary, without_tensors):
            with pytest.raises(InvalidRequest, match=r"a\.gguf is not a readable GGUF file: "):
                read(tmp_path / "a.gguf")


@settings(max_examples=150, deadline=None)
@given(st.integers(4, 300), st.binary(min_size=1, max_size=12))
def test_a_damaged_header_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, at: int, noise: bytes):
    data = gguf_bytes()
    file = tmp_path_factory.getbasetemp() / "damaged.gguf"
    file.write_bytes(data[:at] + noise + data[at + len(noise) :])
    with suppress(InvalidRequest):
        assert isinstance(read_summary(file), GgufSummary)


def test_without_tensors_keeps_all_metadata_except_the_split(tmp_path: Path):
    (tmp_path / "a.gguf").write_bytes(file(text("split.count") + struct.pack("<IH", 2, 3), *ENTRIES).getvalue())
    alone = without_tensors(tmp_path / "a.gguf")
    assert alone == b"GGUF" + struct.pack("<IQQ", 3, 0, len(ENTRIES)) + b"".join(ENTRIES)
    assert read_metadata(io.BytesIO(alone)) == {"name": "toy", "tokens": ["a", "bc"], "size": 7}


ENTRIES = (
    text("name") + struct.pack("<I", 8) + text("toy"),
    text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
    number("size", 7),
)


# --- metadata with lists ----------------------------------------------------------------------------------------------


def file(*entries: bytes, magic: bytes = b"GGUF", version: int = 3) -> io.BytesIO:
    return io.BytesIO(magic + struct.pack("<IQQ", version, 0, len(entries)) + b"".join(entries) + b"tensors follow")


def test_numbers_strings_and_lists_are_read():
    found = read_metadata(
        file(
            text("name") + struct.pack("<I", 8) + text("Ġsmöl"),
            text("size") + struct.pack("<IQ", 10, 2**40),
            text("adds") + struct.pack("<I?", 7, True),
            text("words") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"),
            text("kinds") + struct.pack("<IIQ2i", 9, 5, 2, -1, 3),
        )
    )
    assert found == {"name": "Ġsmöl", "size": 2**40, "adds": True, "words": ["a", "b"], "kinds": [-1, 3]}


def test_invalid_metadata_is_an_error():
    cases = [
        (file(magic=b"GGML"), "begins with b.GGML. and not with"),
        (io.BytesIO(b"text"), "begins with b.text. and not with"),
        (file(version=1), "version 1"),
        (file(text("x") + struct.pack("<I", 99)), "unknown kind 99"),
        (io.BytesIO(b"GGUF\x03"), "ends in the middle"),
    ]
    for broken, message in cases:
        with pytest.raises(ValueError, match=message):
            read_metadata(broken)


def test_no_damage_to_a_header_is_more_than_an_unreadable_file(tmp_path: Path):
    """Each case changes eight bytes: counts, lengths, types, values."""
    file = tmp_path / "model.gguf"
    write_tiny_model(file)
    sound = file.read_bytes()[:4096]
    for seed in range(500):
        random = Random(seed)
        at = random.randrange(3700)
        power = (1 << random.randrange(64)).to_bytes(8, "little")
        changed = random.choice([random.randbytes(8), b"\xff" * 8, b"\0" * 8, power])
        file.write_bytes(sound[:at] + changed + sound[at + 8 :])
        for read in (read_summary, read_contents, without_tensors, read_model_shape):
            with suppress(InvalidRequest):
                read(file)


def test_a_list_that_is_longer_than_any_is_refused_before_it_is_read(tmp_path: Path):
    for kind in (0, 8):  # numbers, strings
        entry = struct.pack("<Q1sIIQ", 1, b"x", 9, kind, 1 << 40)
        (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + b"\0" * 1000)
        with pytest.raises(InvalidRequest, match=f"a list of {1 << 40}"):
            read_contents(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("architecture", "facts", "expected"),
    [
        ("llama", {}, ModelPurpose("chat")),
        ("qwen3", {"pooling_type": 3}, ModelPurpose("embedding", "last")),
        ("qwen3", {"pooling_type": 4}, ModelPurpose("reranking", "rank")),
        ("bert", {"pooling_type": 2, "attention.causal": False}, ModelPurpose("embedding", "cls", causal=False)),
        ("bert", {}, ModelPurpose("embedding", causal=False)),
        ("gemma-embedding", {"pooling_type": 1}, ModelPurpose("embedding", "mean", causal=False)),
        ("bert", {"pooling_type": 4}, ModelPurpose("reranking", "rank", causal=False)),
        ("llama", {"pooling_type": 0}, ModelPurpose("chat", "none")),
        ("llama", {"pooling_type": 77}, ModelPurpose("chat")),
        ("dream", {"attention.causal": False}, ModelPurpose("diffusion", causal=False)),
        ("qwen4exp", {}, ModelPurpose("chat", has_vectors=False)),
    ],
)
def test_the_metadata_say_what_a_model_is_for(architecture: str, facts: dict[str, int], expected: ModelPurpose) -> None:
    named = {f"{architecture}.{name}": value for name, value in facts.items()}
    assert model_purpose({"general.architecture": architecture} | named) == expected


def test_the_purpose_is_read_from_a_file_and_from_its_header(tmp_path: Path) -> None:
    file = tiny_models.bert("rank")
    header = tmp_path / "header.gguf"
    header.write_bytes(without_tensors(file))
    assert read_purpose(file) == read_purpose(header) == ModelPurpose("reranking", "rank", causal=False)
