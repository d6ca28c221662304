from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from modelyard.core.errors import InvalidRequest, ModelyardError, Unavailable
from modelyard.library import models
from modelyard.library.progress import ProgressReporter
from modelyard.plugins import MissingLibrary
from modelyard_convert import convert, writers
from tests.library.convert import tiny_models


@pytest.fixture
def added(tmp_path: Path) -> str:
    models.pull(str(tiny_models.write_model(tmp_path / "tiny.gguf")), name="tiny")
    return "tiny"


def inode(folder: str) -> int:
    return (Path(folder) / "config.json").stat().st_ino


@pytest.mark.parametrize(("to", "quant"), [("hf", "bfloat16"), ("ct2", "int8")])
def test_the_folder_is_in_the_library_and_is_deleted_with_its_entry(added: str, to: str, quant: str, cache: Path):
    entry = convert(added, to)
    assert entry.path == str(cache / "models" / f"tiny-{to}")
    row = models.file_row(next(entry.path for entry in models.list_models() if entry.name == f"tiny-{to}"))
    assert (row.note, row.quant) == ("", quant)
    models.remove_model(f"tiny-{to}")
    assert not Path(entry.path).exists()
    assert models.find_model("tiny") is not None


def test_an_existing_conversion_is_reused(added: str):
    first = convert(added, "hf")
    made = inode(first.path)
    assert convert(added, "hf") == first
    assert inode(first.path) == made


def test_a_changed_source_is_converted_again(added: str, tmp_path: Path):
    first = convert(added, "hf")
    made = inode(first.path)
    tiny_models.write_model(tmp_path / "tiny.gguf", "qwen2")
    assert convert(added, "hf") == first
    assert inode(first.path) != made


def test_another_quantization_is_part_of_the_name(added: str):
    assert convert(added, "ct2", quantization="float16").name == "tiny-ct2-float16"


def test_an_existing_folder_of_the_user_is_not_replaced(added: str, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(InvalidRequest, match="already exists"):
        convert(added, "hf", out=tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_folder_outside_the_library_is_kept_on_removal(added: str, tmp_path: Path):
    entry = convert(added, "hf", out=tmp_path / "mine")
    models.remove_model(entry.name)
    assert (tmp_path / "mine" / "model.safetensors").is_file()


def test_a_failed_conversion_leaves_nothing(added: str, cache: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(writers, "write_hf", full)
    with pytest.raises(Unavailable, match="no space left"):
        convert(added, "hf")
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_files_of_a_killed_conversion_are_removed(added: str, cache: Path):
    (stale := cache / "models" / ".convert-tiny-hf-x").mkdir(parents=True)
    convert(added, "hf")
    assert not stale.exists()


def test_progress_reaches_the_end(added: str):
    lines: list[str] = []
    convert(added, "hf", progress=ProgressReporter(Console(file=io.StringIO()), lines.append))
    assert lines[0] == "converting tiny.gguf to bfloat16"
    assert "100 %" in lines[-1]


@pytest.mark.parametrize(
    ("name", "to", "quantization", "message"),
    [
        ("tiny", "onnx", None, "hf, ct2"),
        ("tiny", "hf", "int8", "bfloat16, float16, float32"),
        ("tiny", "ct2", "bfloat16", "int8"),
        ("missing", "ct2", None, "missing"),
    ],
)
def test_an_unsupported_conversion_is_an_error(added: str, name: str, to: str, quantization: str | None, message: str):
    with pytest.raises(ModelyardError, match=message):
        convert(name, to, quantization=quantization)


@pytest.mark.parametrize("library", ["gguf", "numpy"])
def test_a_missing_library_is_an_error_that_names_the_extra(library: str, added: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingLibrary, match=r"modelyard\[convert\]"):
        convert(added, "hf")
