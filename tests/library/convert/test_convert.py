"""Converting as a person does it: once, into the library, with what goes wrong told in one sentence."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from modelyard.core.errors import InvalidRequest, ModelyardError, Unavailable
from modelyard.library import models
from modelyard.library.convert import convert
from modelyard.library.convert import hf as writer
from modelyard.library.progress import ProgressReporter
from modelyard.plugins import MissingLibrary
from tests.library.convert import tiny


@pytest.fixture
def added(tmp_path: Path) -> str:
    models.add_model(str(tiny.write_model(tmp_path / "tiny.gguf")), name="tiny")
    return "tiny"


def age(folder: str) -> int:
    return (Path(folder) / "config.json").stat().st_ino


@pytest.mark.parametrize(("to", "quant"), [("hf", "bfloat16"), ("ct2", "int8")])
def test_folder_is_in_the_library_and_goes_with_its_entry(added: str, to: str, quant: str, cache: Path):
    entry = convert(added, to)
    assert entry.path == str(cache / "models" / f"tiny-{to}")
    row = {entry.name: file for entry, file in models.list_rows()}[f"tiny-{to}"]
    assert (row.state, row.quant) == ("here", quant)
    models.remove_model(f"tiny-{to}")
    assert not Path(entry.path).exists()
    assert models.find_model("tiny") is not None


def test_second_time_nothing_is_written(added: str):
    first = convert(added, "hf")
    made = age(first.path)
    assert convert(added, "hf") == first
    assert age(first.path) == made


def test_another_source_of_the_same_name_is_converted_anew(added: str, tmp_path: Path):
    first = convert(added, "hf")
    made = age(first.path)
    tiny.write_model(tmp_path / "tiny.gguf", "qwen2")
    assert convert(added, "hf") == first
    assert age(first.path) != made


def test_quantization_of_ones_own_is_part_of_the_name(added: str):
    assert convert(added, "ct2", quantization="float16").name == "tiny-ct2-float16"


def test_folder_of_somebody_else_is_left_alone(added: str, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(InvalidRequest, match="exists already"):
        convert(added, "hf", out=tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []


def test_folder_outside_the_library_stays_when_its_entry_goes(added: str, tmp_path: Path):
    entry = convert(added, "hf", out=tmp_path / "mine")
    models.remove_model(entry.name)
    assert (tmp_path / "mine" / "model.safetensors").is_file()


def test_broken_off_conversion_leaves_nothing(added: str, cache: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(writer, "write", full)
    with pytest.raises(Unavailable, match="no space left"):
        convert(added, "hf")
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_leavings_of_a_killed_conversion_are_swept(added: str, cache: Path):
    (left := cache / "models" / ".convert-tiny-hf-x").mkdir(parents=True)
    convert(added, "hf")
    assert not left.exists()


def test_progress_reaches_the_end(added: str):
    told: list[str] = []
    convert(added, "hf", progress=ProgressReporter(Console(file=io.StringIO()), told.append))
    assert told[0] == "converting tiny.gguf to bfloat16"
    assert "100 %" in told[-1]


@pytest.mark.parametrize(
    ("name", "to", "quantization", "why"),
    [
        ("tiny", "onnx", None, "hf, ct2"),
        ("tiny", "hf", "int8", "bfloat16, float16, float32"),
        ("tiny", "ct2", "bfloat16", "int8"),
        ("nobody", "ct2", None, "nobody"),
    ],
)
def test_what_cannot_be_done_is_told_with_what_can(added: str, name: str, to: str, quantization: str | None, why: str):
    with pytest.raises(ModelyardError, match=why):
        convert(name, to, quantization=quantization)


@pytest.mark.parametrize("library", ["gguf", "numpy"])
def test_missing_library_is_one_sentence(library: str, added: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingLibrary, match=r"modelyard\[convert\]"):
        convert(added, "hf")
