"""Downloads from a local hub over HTTP, with the real huggingface_hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from modelyard.core.errors import Forbidden, InvalidRequest, NotFound, Unavailable
from modelyard.library import huggingface, models
from modelyard.library.huggingface import choose_variant, find_variants
from modelyard.library.model_files import locate_model_file
from modelyard.library.progress import ProgressReporter
from tests.library.files import gguf_bytes
from tests.library.web import Hub, serve_hub

REPO = "maker/Tiny-GGUF"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        running.repos[REPO] = {
            "README.md": b"words",
            "Tiny-Q4_K_M.gguf": gguf_bytes(),
            "mmproj-Tiny-F16.gguf": gguf_bytes(),
            "UD-Q6_K_XL/Tiny-UD-Q6_K_XL-00001-of-00002.gguf": gguf_bytes(quant=18),
            "UD-Q6_K_XL/Tiny-UD-Q6_K_XL-00002-of-00002.gguf": gguf_bytes(quant=18) + b"\0" * 100,
        }
        yield running


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def progress(lines: list[str]) -> ProgressReporter:
    return ProgressReporter(write_line=lines.append)


def test_a_variant_is_fetched_verified_and_named_after_its_repository(
    hub: Hub, progress: ProgressReporter, lines: list[str], cache: Path
):
    entry = models.add_model(REPO, quant="q4_k_m", progress=progress)
    assert (entry.name, entry.source, entry.owned) == ("Tiny", REPO, True)
    assert Path(entry.path) == cache / "models/maker/Tiny-GGUF/Tiny-Q4_K_M.gguf"
    assert Path(entry.path).read_bytes() == gguf_bytes()
    assert locate_model_file("Tiny") == Path(entry.path)
    assert lines[0] == "fetching Tiny-Q4_K_M.gguf"
    assert "100 %" in lines[-1]
    assert not [path for path in hub.requested if "mmproj" in path or "README" in path]


def test_a_split_variant_is_found_by_its_repository_path(
    hub: Hub, progress: ProgressReporter, lines: list[str], cache: Path
):
    entry = models.add_model(f"{REPO}:UD-Q6_K_XL", name="big", progress=progress)
    assert locate_model_file("maker/Tiny-GGUF/UD-Q6_K_XL/") == Path(entry.path)
    assert "fetching Tiny-UD-Q6_K_XL-00002-of-00002.gguf (2 of 2)" in lines


def test_several_variants_are_listed_with_their_sizes(hub: Hub, progress: ProgressReporter):
    with pytest.raises(InvalidRequest, match=r"has 2 variants: choose one with --quant: Q4_K_M \(\d+ B\), UD-Q6_K_XL"):
        models.add_model(REPO, progress=progress)
    with pytest.raises(NotFound, match=r"has no 'Q1'; it has Q4_K_M"):
        models.add_model(REPO, quant="Q1", progress=progress)
    assert models.list_models() == []


def test_an_existing_file_is_not_fetched_again(hub: Hub, progress: ProgressReporter):
    models.add_model(REPO, quant="Q4_K_M", progress=progress)
    before = len([path for path in hub.requested if path.endswith("Q4_K_M.gguf")])
    models.add_model(REPO, quant="Q4_K_M", progress=progress)
    after = len([path for path in hub.requested if path.endswith("Q4_K_M.gguf")])
    assert after - before <= 1, "at most a HEAD request for its checksum"


def test_a_corrupted_file_is_removed(hub: Hub, progress: ProgressReporter, cache: Path):
    hub.corrupted.add("Tiny-Q4_K_M.gguf")
    with pytest.raises(InvalidRequest, match="was corrupted in transfer"):
        models.add_model(REPO, quant="Q4_K_M", progress=progress)
    assert not list(cache.rglob("*.gguf"))
    hub.corrupted.clear()
    assert models.add_model(REPO, quant="Q4_K_M", progress=progress).name == "Tiny"


def test_missing_gated_and_unsuitable_repositories_are_errors(hub: Hub, progress: ProgressReporter):
    hub.gated.add("maker/Secret")
    hub.repos["maker/Other"] = {"model.safetensors": b""}
    with pytest.raises(NotFound, match="no repository 'maker/Nothing'"):
        huggingface.fetch("maker/Nothing", None, progress)
    with pytest.raises(Forbidden, match="HF_TOKEN"):
        huggingface.fetch("maker/Secret", None, progress)
    with pytest.raises(NotFound, match="has no GGUF file"):
        huggingface.fetch("maker/Other", None, progress)


def test_a_download_larger_than_the_disk_is_not_started(
    hub: Hub, progress: ProgressReporter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("modelyard.library.huggingface.shutil.disk_usage", lambda folder: SimpleNamespace(free=3))
    with pytest.raises(Unavailable, match=r"Q4_K_M needs \d+ B, and .* has 3 B free"):
        models.add_model(REPO, quant="Q4_K_M", progress=progress)
    assert not [path for path in hub.requested if "resolve" in path]


def test_an_unreachable_hub_is_an_error(monkeypatch: pytest.MonkeyPatch, progress: ProgressReporter):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match="maker/Tiny-GGUF could not be fetched: "):
        huggingface.fetch(REPO, None, progress)


def test_removing_a_fetched_model_deletes_only_its_files(hub: Hub, progress: ProgressReporter, cache: Path):
    one = models.add_model(REPO, quant="Q4_K_M", name="one", progress=progress)
    two = models.add_model(REPO, quant="UD-Q6_K_XL", name="two", progress=progress)
    models.remove_model("two")
    assert not Path(two.path).parent.exists()
    assert Path(one.path).exists()
    models.remove_model("one")
    assert not (cache / "models/maker").exists()
    assert models.list_models() == []


# --- variants ---------------------------------------------------------------------------------------------------------


def test_the_quantization_is_detected_in_the_name():
    cases = [
        ("Qwen2.5-7B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("smollm2-135m-instruct-q8_0.gguf", "Q8_0"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("BF16/Model-BF16-00001-of-00002.gguf", "BF16"),
        ("UD-Q6_K_XL/MiMo-V2-Flash-UD-Q6_K_XL-00001-of-00006.gguf", "UD-Q6_K_XL"),
        ("IQ3_XXS/model.gguf", "IQ3_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("plain.gguf", "plain"),
    ]
    for name, label in cases:
        assert [variant.label for variant in find_variants({name: 1})] == [label]


def test_paths_outside_the_folder_and_other_files_are_ignored():
    assert find_variants({"../../x.gguf": 1, "/etc/x.gguf": 1, "a/../../x.gguf": 1, "imatrix.gguf": 1}) == []


def test_two_files_of_one_quantization_are_selected_by_name():
    found = find_variants({"a-Q4_0.gguf": 5, "b-Q4_0.gguf": 6})
    with pytest.raises(InvalidRequest, match=r"a-Q4_0\.gguf \(5 B\), b-Q4_0\.gguf \(6 B\)"):
        choose_variant("r", found, "Q4_0")
    assert choose_variant("r", found, "B-Q4_0.gguf").files == ("b-Q4_0.gguf",)


def test_the_parts_of_a_split_variant_are_in_order():
    names = [f"m-Q8_0-0000{n}-of-00003.gguf" for n in (3, 1, 2)]
    (only,) = find_variants(dict.fromkeys(names, 7))
    assert (only.files, only.size) == (tuple(sorted(names)), 21)
    assert choose_variant("r", [only], None) is only
