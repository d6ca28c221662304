from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound
from modelyard.library import model_files, models
from modelyard.library.progress import ProgressReporter
from modelyard.library.variants import MemoryBudget
from tests.library.files import gguf_bytes, write_gguf
from tests.library.web import Hub, serve_hub


def test_files_folders_and_split_models_are_added_under_their_names(tmp_path: Path):
    write_gguf(tmp_path / "a.Q4_0.gguf")
    write_gguf(tmp_path / "folder/b.gguf")
    for n in (1, 2):
        write_gguf(tmp_path / f"split/c-0000{n}-of-00002.gguf")
    for source in ("a.Q4_0.gguf", "folder", "split/c-00002-of-00002.gguf"):
        models.pull(str(tmp_path / source))
    assert [entry.name for entry in models.list_models()] == ["a.Q4_0", "b", "c"]
    assert not any(entry.owned for entry in models.list_models())


def test_a_quantization_is_a_subfolder_or_part_of_a_file_name(tmp_path: Path):
    inner = write_gguf(tmp_path / "Q8_0/x.gguf")
    other = write_gguf(tmp_path / "y-Q4_0.gguf")
    write_gguf(tmp_path / "y-Q5_0.gguf")
    assert models.pull(str(tmp_path), quant="Q8_0").path == str(inner)
    assert models.pull(str(tmp_path), quant="q4_0").path == str(other)
    with pytest.raises(InvalidRequest, match="contains 2 models"):
        models.pull(str(tmp_path), quant="Q2_K")


def test_a_relative_path_is_stored_as_absolute():
    file = write_gguf(Path("models/org/repo/Q4/x.gguf"))
    assert models.pull("org/repo/Q4/").path == str(file.resolve())


def test_a_name_belongs_to_one_file(tmp_path: Path):
    one, two = (write_gguf(tmp_path / f"{name}.gguf") for name in ("one", "two"))
    models.pull(str(one), name="same")
    models.pull(str(one), name="same")
    with pytest.raises(InvalidRequest, match="choose another name with --name"):
        models.pull(str(two), name="same")
    assert len(models.list_models()) == 1


def test_an_invalid_name_is_refused(tmp_path: Path):
    file = write_gguf(tmp_path / "one.gguf")
    for name in (" ", "a b", "../a", "a\nb", "/a", "a//b"):
        with pytest.raises(InvalidRequest, match="cannot be a model's name"):
            models.pull(str(file), name=name)
    assert models.list_models() == []


def test_an_unreadable_file_is_not_added(tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(b"words")
    with pytest.raises(ModelyardError, match="not a readable GGUF file"):
        models.pull(str(tmp_path / "x.gguf"))
    assert models.list_models() == []


def test_removing_a_local_model_keeps_its_file(tmp_path: Path):
    file = write_gguf(tmp_path / "one.gguf")
    models.pull(str(file))
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
    assert models.file_row(str(file)) == models.FileRow(file.stat().st_size, "Q4_K_M")
    assert models.file_row(str(bad)).note == "its file cannot be read"
    assert models.file_row("nowhere.gguf").note == "its file is missing"
    assert models.file_row(None) == models.FileRow()


def test_the_configuration_snippet_is_valid_toml_for_any_name():
    assert models.config_snippet(model_files.LibraryEntry("a.b", "/x y.gguf")) == '[models."a.b"]\npath = "/x y.gguf"'
    assert models.config_snippet(model_files.LibraryEntry("a-b_1", "/x.gguf")).startswith("[models.a-b_1]\n")


# --- what a MODEL argument means --------------------------------------------------------------------------------------


def test_a_library_name_comes_before_a_path_and_a_path_before_the_hub(tmp_path: Path):
    file = write_gguf(Path("org/repo.gguf"))
    entry = models.pull(str(file), name="org")
    assert models.resolve_source("org").entry == entry
    assert models.resolve_source("org/repo.gguf").path == file.resolve()
    reference = models.resolve_source("org/repo").hub
    assert reference is not None
    assert reference.repo == "org/repo"


def test_what_is_neither_is_one_sentence_that_names_the_library():
    with pytest.raises(NotFound, match=r"there is no model 'nobody': it is not a file or folder here, not in the lib"):
        models.resolve_source("nobody")
    with pytest.raises(NotFound, match=r"there is no file 'a/b\.gguf'"):
        models.resolve_source("a/b.gguf")
    with pytest.raises(NotFound, match=r"is not a repository or file of the hub at https://huggingface\.co"):
        models.resolve_source("https://example.com/a/b")


def test_a_local_model_brings_the_projector_beside_it(tmp_path: Path):
    file = write_gguf(tmp_path / "eyes-Q4_0.gguf")
    projector = write_gguf(tmp_path / "mmproj-F16.gguf")
    assert models.pull(str(file)).projector == str(projector)


def test_a_local_folder_for_another_engine_is_added(tmp_path: Path):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    assert models.pull(str(folder)).path == str(folder)


# --- models of the hub ------------------------------------------------------------------------------------------------

GB = 2**30
REPO = "maker/Eyes-GGUF"
TWO_PARTS = ("UD-Q6_K_XL/Eyes-UD-Q6_K_XL-00001-of-00002.gguf", "UD-Q6_K_XL/Eyes-UD-Q6_K_XL-00002-of-00002.gguf")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HOME", "/nonexistent")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        running.repos[REPO] = {
            "README.md": b"words",
            "Eyes-Q4_K_M.gguf": gguf_bytes() + bytes(1000),
            "Eyes-Q8_0.gguf": gguf_bytes(quant=7) + bytes(8000),
            "Eyes-BF16.gguf": gguf_bytes(quant=32) + bytes(16000),
            "mmproj-F16.gguf": gguf_bytes() + b"f16",
            "mmproj-F32.gguf": gguf_bytes() + b"f32",
            TWO_PARTS[0]: gguf_bytes(quant=18),
            TWO_PARTS[1]: gguf_bytes(quant=18) + bytes(5000),
        }
        yield running


def pull(source: str = REPO, lines: list[str] | None = None, **more: Any) -> model_files.LibraryEntry:
    progress = ProgressReporter(write_line=(lines if lines is not None else []).append)
    return models.pull(source, progress=progress, update=True, **more)


def names(entry: model_files.LibraryEntry) -> list[str]:
    """Every model file in its folder."""
    root = model_files.models_dir() / entry.source
    return sorted(file.relative_to(root).as_posix() for file in root.rglob("*.gguf"))


def test_the_best_quantization_that_fits_is_fetched_with_its_projector_and_reported(hub: Hub):
    lines: list[str] = []
    entry = pull(lines=lines, budget=MemoryBudget(GB))
    assert (entry.name, entry.quant, names(entry)) == ("Eyes", "Q8_0", ["Eyes-Q8_0.gguf", "mmproj-F16.gguf"])
    assert entry.projector == str(Path(entry.path).parent / "mmproj-F16.gguf")
    assert lines[0].startswith("Q8_0 is the best that fits: it takes ")
    assert "Others with --quant: Q4_K_M" in lines[0]
    assert lines[1] == "the image projector in F16, which is exact and fast everywhere (not F32)"
    assert lines[2] == "fetching Eyes-Q8_0.gguf and 1 more"
    assert entry.choice == "; ".join(lines[:2])


def test_less_memory_takes_a_smaller_quantization(hub: Hub):
    need = len(hub.repos[REPO]["Eyes-Q8_0.gguf"])
    assert pull(budget=MemoryBudget(need)).quant == "Q4_K_M"


def test_a_split_model_is_found_by_its_repository_and_folder(hub: Hub):
    entry = pull(f"{REPO}:UD-Q6_K_XL", name="big")
    assert names(entry) == [*TWO_PARTS, "mmproj-F16.gguf"]
    for path in ("maker/Eyes-GGUF/UD-Q6_K_XL/", "big", REPO, f"hf.co/{REPO}:ud-q6_k_xl"):
        assert model_files.locate_model_file(path) == Path(entry.path)


def test_a_second_quantization_has_it_in_its_name_and_shares_the_projector(hub: Hub):
    one, two = pull(f"{REPO}:Q8_0"), pull(f"{hub.url}/{REPO}/blob/main/Eyes-Q4_K_M.gguf", name="small")
    three = pull(f"hf.co/{REPO}:BF16")
    assert [entry.name for entry in (one, two, three)] == ["Eyes", "small", "Eyes-BF16"]
    assert hub.downloads.count(f"/cdn/{REPO}//mmproj-F16.gguf") == 1
    models.remove_model("Eyes")
    assert names(two) == ["Eyes-BF16.gguf", "Eyes-Q4_K_M.gguf", "mmproj-F16.gguf"]
    models.remove_model("small")
    models.remove_model("Eyes-BF16")
    assert not (model_files.models_dir() / "maker").exists()


def test_a_file_url_is_named_after_the_file(hub: Hub):
    assert pull(f"{hub.url}/{REPO}/resolve/main/Eyes-Q4_K_M.gguf?download=true").name == "Eyes-Q4_K_M"


def test_unknown_quantizations_list_the_known_ones(hub: Hub):
    with pytest.raises(NotFound, match=r"has no 'Q1'; it has Q4_K_M"):
        pull(quant="Q1")
    assert models.list_models() == []


def test_an_invalid_name_is_refused_before_the_download(hub: Hub):
    with pytest.raises(InvalidRequest, match="cannot be a model's name"):
        pull(name="a b")
    assert hub.requested == []


def test_a_hugging_face_folder_is_fetched_without_other_formats(hub: Hub):
    files = {"config.json": b"{}", "model.safetensors": b"0123456789", "tokenizer.json": b"{}", "x.png": b"p"}
    hub.repos["maker/Folder"] = {**files, "pytorch_model.bin": b"bin", "onnx/model.onnx": b"onnx"}
    entry = pull("maker/Folder")
    assert sorted(file.name for file in Path(entry.path).glob("[!.]*")) == sorted(files.keys() - {"x.png"})
    assert model_files.find_model_folder("maker/Folder") is not None
    models.remove_model("Folder")
    assert not Path(entry.path).exists()


def test_an_exl3_repository_is_fetched_from_the_branch_that_fits(hub: Hub):
    folder = {"config.json": b'{"quantization_config": {"quant_method": "exl3"}}', "model.safetensors": bytes(4000)}
    hub.repos["maker/M-exl3"] = {"README.md": b"see branches"}
    hub.repos["maker/M-exl3@4.0bpw"] = folder
    hub.repos["maker/M-exl3@8.0bpw"] = folder | {"model.safetensors": bytes(8000)}
    lines: list[str] = []
    entry = pull("maker/M-exl3", lines, budget=MemoryBudget(0, GB))
    assert (entry.quant, Path(entry.path).name) == ("4.0bpw", "M-exl3@4.0bpw")
    assert lines[0].startswith("4.0bpw is the best that fits the 1.0 GiB of GPU memory")
    assert pull("maker/M-exl3:8.0bpw").name == "M-exl3-8.0bpw"
    with pytest.raises(NotFound, match=r"its branches are main, 4\.0bpw, 8\.0bpw"):
        pull("maker/M-exl3:2.0bpw")


def test_a_name_of_another_model_is_not_taken_over(hub: Hub, tmp_path: Path):
    models.pull(str(write_gguf(tmp_path / "x.gguf")), name="mine")
    with pytest.raises(InvalidRequest, match=r"the library already has a 'mine'"):
        pull(f"{REPO}:Q4_K_M", name="mine")
