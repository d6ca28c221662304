"""A child process opens a model file before the server does: damage that kills llama.cpp kills the child."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.engines.llama_cpp import file_check, loading, own_process
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.file_check import explain, find_fault
from modelyard.engines.llama_cpp.options import Options
from modelyard.engines.llama_cpp.selftest import write_tiny_model
from modelyard.library.default_model import fetch
from modelyard.library.gguf import without_tensors
from modelyard.processes.sandbox import Limits, Sandbox
from tests.engines.llama_cpp.helpers import running
from tests.processes import sandbox_jobs as jobs


@pytest.fixture
def own_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its children find the functions of these tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    pool = Sandbox()
    monkeypatch.setattr(file_check, "pool", pool)
    yield
    pool.close()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch()
    monkeypatch.setattr(file_check, "cache_dir", lambda: tmp_path / "cache")


@cache
def header() -> bytes:
    """The default model without its tensors."""
    return without_tensors(fetch())


def with_two_equal_tokens(data: bytes) -> bytes:
    """llama.cpp asserts that all tokens differ. Both texts have the same length."""
    one, other = ("".join(["\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}", text]).encode() for text in ("house", "water"))
    at = data.index(len(one).to_bytes(8, "little") + one) + 8
    assert other in data
    return data[:at] + other + data[at + len(one) :]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_vocabulary_that_kills_llama_cpp_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = write(tmp_path / "damaged.gguf", with_two_equal_tokens(header()))
    with pytest.raises(InvalidRequest, match="two tokens of its vocabulary are equal") as caught:
        file_check.check_vocabulary(file)
    assert caught.value.code == "tokenizer_broken"
    assert caught.value.message.startswith(f"{file} has no readable vocabulary: ")
    assert caught.value.message.endswith("convert the model again")
    assert "\n" not in caught.value.message


def test_a_model_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    """llama.cpp aborts as soon as such a vocabulary is used."""
    write_tiny_model(tmp_path / "tiny.gguf")
    assert "died" in (find_fault("vocabulary", [tmp_path / "tiny.gguf"]) or "")


@pytest.mark.parametrize("purpose", ["vocabulary", "weights"])
@pytest.mark.usefixtures("own_pool")
def test_a_pass_is_remembered_until_the_file_changes(purpose: file_check.Purpose, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    if purpose == "vocabulary":
        write(file, header())
    else:
        write_tiny_model(file)
    before = file.stat()
    assert find_fault(purpose, [file]) is None
    assert find_fault(purpose, [file], check=jobs.started) is None
    with file.open("r+b") as opened:
        opened.seek(100)
        opened.write(b"\xff" * 8)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert find_fault(purpose, [file], check=jobs.started) == "started it"


@pytest.mark.usefixtures("own_pool")
def test_a_fault_is_not_remembered(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", header())
    assert find_fault("vocabulary", [file], check=jobs.dying) is not None
    assert find_fault("vocabulary", [file]) is None


def test_a_refusal_has_the_reason_of_llama_cpp(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", b"no such thing" * 100)
    with pytest.raises(InvalidRequest, match=r"cannot be loaded: .*invalid magic characters"):
        file_check.check_weights(file)


@pytest.mark.usefixtures("own_pool")
def test_a_check_ends_when_nobody_waits_for_it(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", header())
    assert find_fault("weights", [file], lambda: False, check=jobs.endless) == "loading was stopped"


@pytest.mark.usefixtures("own_pool")
def test_a_check_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_check, "_LIMITS", Limits(wall_s=0.3, opens_files=True))
    file = write(tmp_path / "model.gguf", header())
    assert "takes more than" in (find_fault("weights", [file], check=jobs.endless) or "")


def test_a_slow_disk_is_no_fault() -> None:
    assert explain(None, "stage reading the header\nstage computing with the weights\n") is None
    assert explain(-9, "stage computing with the weights\n") == (
        "llama.cpp died while computing with the weights (SIGKILL); the file is damaged, fetch it again"
    )


def test_no_damage_to_a_header_kills_this_process(tmp_path: Path) -> None:
    """Each case changes eight bytes. What the child passes is opened here."""
    write_tiny_model(tmp_path / "tiny.gguf")
    sound = (tmp_path / "tiny.gguf").read_bytes()
    for seed in range(4):
        random = Random(seed)
        at = random.randrange(3700)
        file = write(tmp_path / f"{seed}.gguf", sound[:at] + random.randbytes(8) + sound[at + 8 :])
        fault = find_fault("weights", [file])
        assert fault is None or "\n" not in fault
        if fault is None:
            lib.llama_model_free(loading.load_model(file, Options(path=str(file)), lambda _: True))


@pytest.mark.asyncio
async def test_truncating_a_loaded_file_changes_nothing(tmp_path: Path) -> None:
    """A mapped file would kill the process with SIGBUS."""
    file = write(tmp_path / "model.gguf", fetch().read_bytes())
    async with running(path=str(file), embeddings=True) as engine:
        os.truncate(file, 4096)
        assert len((await engine.embed([[1, 2, 3]])).vectors) == 1


def test_a_mapped_model_gets_its_own_process() -> None:
    assert own_process(Options(path=str(fetch()), use_mmap=True, n_gpu_layers=0))
    assert not own_process(Options(path=str(fetch()), n_gpu_layers=0))
    assert not Options(path="x").use_mmap
