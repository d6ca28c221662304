from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound
from modelyard.library import model_files, models
from tests.library.files import write_gguf


def test_files_folders_and_split_models_are_added_under_their_names(tmp_path: Path):
    write_gguf(tmp_path / "a.Q4_0.gguf")
    write_gguf(tmp_path / "folder/b.gguf")
    for n in (1, 2):
        write_gguf(tmp_path / f"split/c-0000{n}-of-00002.gguf")
    for source in ("a.Q4_0.gguf", "folder", "split/c-00002-of-00002.gguf"):
        models.add_model(str(tmp_path / source))
    assert [entry.name for entry in models.list_models()] == ["a.Q4_0", "b", "c"]
    assert not any(entry.owned for entry in models.list_models())


def test_a_quantization_is_a_subfolder_or_part_of_a_file_name(tmp_path: Path):
    inner = write_gguf(tmp_path / "Q8_0/x.gguf")
    other = write_gguf(tmp_path / "y-Q4_0.gguf")
    write_gguf(tmp_path / "y-Q5_0.gguf")
    assert models.add_model(str(tmp_path), quant="Q8_0").path == str(inner)
    assert models.add_model(str(tmp_path), quant="q4_0").path == str(other)
    with pytest.raises(InvalidRequest, match="contains 2 models"):
        models.add_model(str(tmp_path), quant="Q2_K")


def test_a_relative_path_is_stored_as_absolute():
    file = write_gguf(Path("models/org/repo/Q4/x.gguf"))
    assert models.add_model("org/repo/Q4/").path == str(file.resolve())


def test_a_name_belongs_to_one_file(tmp_path: Path):
    one, two = (write_gguf(tmp_path / f"{name}.gguf") for name in ("one", "two"))
    models.add_model(str(one), name="same")
    models.add_model(str(one), name="same")
    with pytest.raises(InvalidRequest, match="choose another name with --name"):
        models.add_model(str(two), name="same")
    assert len(models.list_models()) == 1


def test_an_invalid_name_is_refused(tmp_path: Path):
    file = write_gguf(tmp_path / "one.gguf")
    for name in (" ", "a b", "../a", "a\nb", "/a", "a//b"):
        with pytest.raises(InvalidRequest, match="cannot be a model's name"):
            models.add_model(str(file), name=name)
    assert models.list_models() == []


def test_an_unreadable_file_is_not_added(tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(b"words")
    with pytest.raises(ModelyardError, match="not a readable GGUF file"):
        models.add_model(str(tmp_path / "x.gguf"))
    assert models.list_models() == []


def test_removing_a_local_model_keeps_its_file(tmp_path: Path):
    file = write_gguf(tmp_path / "one.gguf")
    models.add_model(str(file))
    models.remove_model("one")
    assert file.exists()
    with pytest.raises(NotFound, match="the library has no 'one'; it has nothing"):
        models.remove_model("one")


def test_an_owned_file_outside_the_library_is_never_deleted(tmp_path: Path):
    file = write_gguf(tmp_path / "elsewhere/one.gguf")
    model_files.put_entry(model_files.LibraryEntry("outside", str(file), owned=True))
    models.remove_model("outside")
    assert file.exists()


def test_an_invalid_index_is_an_error(cache: Path):
    (cache / "models").mkdir(parents=True)
    (cache / "models/library.json").write_text("{")
    with pytest.raises(InvalidRequest, match=r"library\.json cannot be read"):
        models.list_models()


def test_rows_have_size_quantization_and_state(tmp_path: Path):
    file = write_gguf(tmp_path / "one.gguf")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"x")
    assert models.file_row(str(file)) == models.FileRow(f"{file.stat().st_size} B", "Q4_K_M", "here")
    assert models.file_row(str(bad)).state == "unreadable"
    assert models.file_row("nowhere.gguf").state == "missing"
    assert models.file_row(None) == models.FileRow()


def test_the_configuration_snippet_is_valid_toml_for_any_name():
    assert models.config_snippet(model_files.LibraryEntry("a.b", "/x y.gguf")) == '[models."a.b"]\npath = "/x y.gguf"'
    assert models.config_snippet(model_files.LibraryEntry("a-b_1", "/x.gguf")).startswith("[models.a-b_1]\n")
