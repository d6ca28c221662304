from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.config.backends import guess_backend
from modelyard.library import model_files, models
from modelyard.library.model_files import LibraryEntry


def make(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_bytes(b"x" * 10)
    return folder


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (("model.bin", "vocabulary.json"), "ct2"),
        (("model.bin", "vocabulary.txt"), "ct2"),
        (("model.bin", "config.json"), None),  # an old kind of Hugging Face weights
        (("config.json", "model.safetensors"), "hf"),
        (("config.json", "model-00001-of-00002.safetensors"), "hf"),
        (("model.safetensors",), None),
        ((), None),
    ],
)
def test_a_folder_is_known_by_what_lies_in_it(files: tuple[str, ...], kind: str | None, tmp_path: Path):
    assert model_files.folder_format(make(tmp_path / "m", *files)) == kind


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "model.bin").write_bytes(b"")
    assert model_files.folder_format(tmp_path / "model.bin") is None


def test_it_is_found_in_the_library_by_its_name_and_shown_with_its_size(cache: Path):
    folder = make(cache / "models" / "tiny-ct2", "model.bin", "vocabulary.json")
    (folder / "modelyard.json").write_text('{"quantization": "int8", "source": "tiny.gguf"}')
    found = model_files.find_model_folder("tiny-ct2")
    assert found is not None
    assert (found.path, found.kind, found.quant) == (folder, "ct2", "int8")
    row = models.file_row("tiny-ct2")
    assert (row.size, row.quant, row.state) == ("67 B", "int8", "here")
    assert dict(models.describe_file("tiny-ct2"))["kind"] == "CTranslate2"


def test_a_note_that_cannot_be_read_is_no_quantization(tmp_path: Path):
    folder = make(tmp_path / "m", "model.bin", "vocabulary.json", "modelyard.json")
    found = model_files.find_model_folder(str(folder))
    assert found is not None
    assert found.quant == ""


def test_the_engine_is_guessed_from_a_ctranslate2_folder_alone(tmp_path: Path):
    assert guess_backend(str(make(tmp_path / "a", "model.bin", "vocabulary.json"))) == "ct2"
    assert guess_backend(str(make(tmp_path / "b", "config.json", "model.safetensors"))) is None


def test_removing_an_owned_folder_takes_it_away_and_anybody_elses_stays(cache: Path, tmp_path: Path):
    ours, theirs = make(cache / "models" / "ours", "model.bin"), make(tmp_path / "theirs", "model.bin")
    model_files.put_entry(LibraryEntry("ours", str(ours), owned=True))
    model_files.put_entry(
        LibraryEntry("theirs", str(theirs), owned=True)
    )  # a lie in the index must not delete what is not ours
    models.remove_model("ours")
    assert not ours.exists()
    models.remove_model("theirs")
    assert (theirs / "model.bin").is_file()
