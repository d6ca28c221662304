from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.config.settings import infer_backend
from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound
from modelyard.library import model_files, models
from modelyard.library.model_files import (
    LibraryEntry,
    find_model_file,
    group_split_files,
    leads_to_gguf,
    locate_model_file,
    split_parts,
)
from tests.library.files import write_gguf

REPO_PATH = "unsloth/MiMo-V2-Flash-GGUF/UD-Q6_K_XL/"


@pytest.mark.parametrize("folder", ["", "models", "../cache/models"])
def test_a_relative_path_is_found_in_the_current_folder_in_models_and_in_the_library(folder: str):
    names = [f"MiMo-UD-Q6_K_XL-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for name in names:
        write_gguf(Path(folder) / REPO_PATH / name)
    assert locate_model_file(REPO_PATH).name == names[0]
    assert leads_to_gguf(REPO_PATH)


def test_any_part_of_a_split_model_leads_to_the_first(tmp_path: Path):
    first, second = (write_gguf(tmp_path / f"m-0000{n}-of-00002.gguf") for n in (1, 2))
    assert locate_model_file(str(second)) == first
    assert split_parts(first) == [first, second]
    second.unlink()
    with pytest.raises(NotFound, match=r"split into 2 files; missing: m-00002-of-00002\.gguf"):
        locate_model_file(str(first))
    assert find_model_file(str(first)) is None


def test_a_folder_with_two_models_is_ambiguous(tmp_path: Path):
    for name in ("a.gguf", "b.gguf", "mmproj-a.gguf"):
        write_gguf(tmp_path / name)
    with pytest.raises(InvalidRequest, match=r"contains 2 models: choose one of a\.gguf, b\.gguf$"):
        locate_model_file(str(tmp_path))
    assert leads_to_gguf(str(tmp_path))
    (tmp_path / "b.gguf").unlink()
    assert locate_model_file(str(tmp_path)).name == "a.gguf"


def test_a_folder_without_models_is_an_error_that_names_its_subfolders_with_models(tmp_path: Path):
    write_gguf(tmp_path / "Q4_0/a.gguf")
    with pytest.raises(NotFound, match="these folders in it do: Q4_0/"):
        locate_model_file(str(tmp_path))
    assert not leads_to_gguf(str(tmp_path))


def test_a_name_in_the_library_is_accepted_as_a_path(tmp_path: Path):
    file = write_gguf(tmp_path / "elsewhere/x.gguf")
    model_files.put_entry(model_files.LibraryEntry("mine", str(file)))
    assert locate_model_file("mine") == file


def test_a_missing_file_is_an_error_that_names_the_searched_folders():
    for path in ("nowhere.gguf", "./nowhere.gguf", "/nowhere/at.gguf", "~/nowhere-at-all.gguf"):
        with pytest.raises(ModelyardError, match=r"no model file .*; looked in "):
            locate_model_file(path)
        assert not leads_to_gguf(path)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("owner/Repo-GGUF/Q4_K_M/", "; fetch it: modelyard pull owner/Repo-GGUF:Q4_K_M"),
        ("owner/Repo-GGUF", "; fetch it: modelyard pull owner/Repo-GGUF"),
        ("/models/owner/Repo-GGUF", ""),
        ("/absolute/repo", ""),
        ("./owner/repo", ""),
        ("owner/repo/file.gguf", ""),
        ("a/b/c/d", ""),
        ("qwen", ""),
    ],
)
def test_a_hint_to_pull_is_for_repositories_of_the_hub_and_not_for_paths_of_this_machine(path: str, hint: str):
    assert model_files.pull_hint(path) == hint
    with pytest.raises(ModelyardError) as error:
        model_files.locate_model_file(path)
    assert error.value.message.endswith(hint)


def test_split_files_are_grouped_by_model():
    assert group_split_files(["q/b-00002-of-00002.gguf", "a.gguf", "q/b-00001-of-00002.gguf"]) == {
        "a": ["a.gguf"],
        "q/b": ["q/b-00001-of-00002.gguf", "q/b-00002-of-00002.gguf"],
    }


def make_folder(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_bytes(b"x" * 10)
    return folder


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (("model.bin", "vocabulary.json"), "ct2"),
        (("model.bin", "vocabulary.txt"), "ct2"),
        (("model.bin", "config.json"), None),  # the older format of Hugging Face weights
        (("config.json", "model.safetensors"), "hf"),
        (("config.json", "model-00001-of-00002.safetensors"), "hf"),
        (("model.safetensors",), None),
        ((), None),
    ],
)
def test_the_format_of_a_folder_is_detected_by_its_files(files: tuple[str, ...], kind: str | None, tmp_path: Path):
    assert model_files.folder_format(make_folder(tmp_path / "m", *files)) == kind


def test_a_file_is_not_a_model_folder(tmp_path: Path):
    (tmp_path / "model.bin").write_bytes(b"")
    assert model_files.folder_format(tmp_path / "model.bin") is None


def test_a_folder_is_found_by_name_and_described(cache: Path):
    folder = make_folder(cache / "models" / "tiny-ct2", "model.bin", "vocabulary.json")
    (folder / "modelyard.json").write_text('{"quantization": "int8", "source": "tiny.gguf"}')
    found = model_files.find_model_folder("tiny-ct2")
    assert found is not None
    assert (found.path, found.kind, found.quant) == (folder, "ct2", "int8")
    row = models.file_row("tiny-ct2")
    assert row == models.FileRow(67, "int8")
    assert dict(models.describe_file("tiny-ct2"))["kind"] == "CTranslate2"


def test_an_unreadable_note_gives_no_quantization(tmp_path: Path):
    folder = make_folder(tmp_path / "m", "model.bin", "vocabulary.json", "modelyard.json")
    found = model_files.find_model_folder(str(folder))
    assert found is not None
    assert found.quant == ""


def test_a_folder_implies_its_backend(tmp_path: Path):
    assert infer_backend(str(make_folder(tmp_path / "a", "model.bin", "vocabulary.json"))) == "ct2"
    assert infer_backend(str(make_folder(tmp_path / "b", "config.json", "model.safetensors"))) in ("vllm", "vllm_serve")


def test_removing_a_model_deletes_its_folder_only_inside_the_library(cache: Path, tmp_path: Path):
    inside = make_folder(cache / "models" / "inside", "model.bin")
    outside = make_folder(tmp_path / "outside", "model.bin")
    model_files.put_entry(LibraryEntry("inside", str(inside), owned=True))
    # A wrong entry must not delete other files.
    model_files.put_entry(LibraryEntry("outside", str(outside), owned=True))
    models.remove_model("inside")
    assert not inside.exists()
    models.remove_model("outside")
    assert (outside / "model.bin").is_file()
