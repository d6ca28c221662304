"""What is added stays where it is, and has one name."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound
from modelyard.library import model_files, models
from tests.library.files import write_gguf


def test_a_file_a_folder_and_a_split_model_are_added_under_their_names(tmp_path: Path):
    write_gguf(tmp_path / "a.Q4_0.gguf")
    write_gguf(tmp_path / "folder/b.gguf")
    for n in (1, 2):
        write_gguf(tmp_path / f"split/c-0000{n}-of-00002.gguf")
    for source in ("a.Q4_0.gguf", "folder", "split/c-00002-of-00002.gguf"):
        models.add_model(str(tmp_path / source))
    assert [entry.name for entry in models.list_models()] == ["a.Q4_0", "b", "c"]
    assert not any(entry.owned for entry in models.list_models())


def test_a_quantization_is_an_inner_folder_or_a_part_of_a_name(tmp_path: Path):
    inner = write_gguf(tmp_path / "Q8_0/x.gguf")
    other = write_gguf(tmp_path / "y-Q4_0.gguf")
    write_gguf(tmp_path / "y-Q5_0.gguf")
    assert models.add_model(str(tmp_path), quant="Q8_0").path == str(inner)
    assert models.add_model(str(tmp_path), quant="q4_0").path == str(other)
    with pytest.raises(InvalidRequest, match="holds 2 models"):
        models.add_model(str(tmp_path), quant="Q2_K")


def test_a_relative_path_is_remembered_whole_and_under_models_too():
    file = write_gguf(Path("models/org/repo/Q4/x.gguf"))
    assert models.add_model("org/repo/Q4/").path == str(file.resolve())


def test_a_name_means_one_file_only(tmp_path: Path):
    one, two = (write_gguf(tmp_path / f"{name}.gguf") for name in ("one", "two"))
    models.add_model(str(one), name="same")
    models.add_model(str(one), name="same")
    with pytest.raises(InvalidRequest, match="choose another name with --name"):
        models.add_model(str(two), name="same")
    assert len(models.list_models()) == 1


@pytest.mark.parametrize("name", ["", "a b", "../a", "a\nb", "/a", "a//b"])
def test_a_name_that_no_client_could_ask_for_is_refused(name: str, tmp_path: Path):
    file = write_gguf(tmp_path / "one.gguf")
    with pytest.raises(InvalidRequest, match="cannot be a model's name"):
        models.add_model(str(file), name=name or " ")
    assert models.list_models() == []


def test_what_is_no_gguf_is_not_added(tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(b"words")
    with pytest.raises(ModelyardError, match="not a readable GGUF file"):
        models.add_model(str(tmp_path / "x.gguf"))
    assert models.list_models() == []


def test_removing_a_local_model_leaves_its_file(tmp_path: Path):
    file = write_gguf(tmp_path / "one.gguf")
    models.add_model(str(file))
    models.remove_model("one")
    assert file.exists()
    with pytest.raises(NotFound, match="the library has no 'one'; it has nothing"):
        models.remove_model("one")


def test_what_says_it_is_ours_and_lies_elsewhere_is_never_deleted(tmp_path: Path):
    file = write_gguf(tmp_path / "elsewhere/one.gguf")
    model_files.put_entry(model_files.LibraryEntry("liar", str(file), owned=True))
    models.remove_model("liar")
    assert file.exists()


def test_a_broken_index_says_so(cache: Path):
    (cache / "models").mkdir(parents=True)
    (cache / "models/library.json").write_text("{")
    with pytest.raises(InvalidRequest, match=r"library\.json cannot be read"):
        models.list_models()


def test_rows_say_size_quantization_and_state(tmp_path: Path):
    file = write_gguf(tmp_path / "one.gguf")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"x")
    assert models.file_row(str(file)) == models.FileRow(f"{file.stat().st_size} B", "Q4_K_M", "here")
    assert models.file_row(str(bad)).state == "unreadable"
    assert models.file_row("nowhere.gguf").state == "missing"
    assert models.file_row(None) == models.FileRow()


def test_the_lines_to_serve_a_model_are_toml_whatever_its_name():
    assert models.config_snippet(model_files.LibraryEntry("a.b", "/x y.gguf")) == '[models."a.b"]\npath = "/x y.gguf"'
    assert models.config_snippet(model_files.LibraryEntry("a-b_1", "/x.gguf")).startswith("[models.a-b_1]\n")
