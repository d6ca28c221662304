"""Models from a hub: a small one of our own, over HTTP, through the real huggingface_hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from modelyard.core.errors import Forbidden, InvalidRequest, NotFound, Unavailable
from modelyard.library import huggingface as library_hub
from modelyard.library import models
from modelyard.library.huggingface import choose_variant, find_variants
from modelyard.library.model_files import locate_model_file
from modelyard.library.progress import ProgressReporter
from tests.library.files import gguf_bytes
from tests.library.web import Hub, serving

REPO = "maker/Tiny-GGUF"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as running:
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
def said() -> list[str]:
    return []


@pytest.fixture
def meter(said: list[str]) -> ProgressReporter:
    return ProgressReporter(write_line=said.append)


def test_one_variant_is_fetched_checked_and_named_after_its_repository(
    hub: Hub, meter: ProgressReporter, said: list[str], cache: Path
):
    entry = models.add_model(REPO, quant="q4_k_m", progress=meter)
    assert (entry.name, entry.source, entry.owned) == ("Tiny", REPO, True)
    assert Path(entry.path) == cache / "models/maker/Tiny-GGUF/Tiny-Q4_K_M.gguf"
    assert Path(entry.path).read_bytes() == gguf_bytes()
    assert locate_model_file("Tiny") == Path(entry.path)
    assert said[0] == "fetching Tiny-Q4_K_M.gguf"
    assert "100 %" in said[-1]
    assert not [path for path in hub.asked if "mmproj" in path or "README" in path]


def test_a_split_variant_lies_where_a_configuration_looks_for_it(
    hub: Hub, meter: ProgressReporter, said: list[str], cache: Path
):
    entry = models.add_model(f"{REPO}:UD-Q6_K_XL", name="big", progress=meter)
    assert locate_model_file("maker/Tiny-GGUF/UD-Q6_K_XL/") == Path(entry.path)
    assert "fetching Tiny-UD-Q6_K_XL-00002-of-00002.gguf (2 of 2)" in said


def test_several_variants_are_listed_with_their_sizes(hub: Hub, meter: ProgressReporter):
    with pytest.raises(InvalidRequest, match=r"has 2 variants: choose one with --quant: Q4_K_M \(\d+ B\), UD-Q6_K_XL"):
        models.add_model(REPO, progress=meter)
    with pytest.raises(NotFound, match=r"has no 'Q1'; it has Q4_K_M"):
        models.add_model(REPO, quant="Q1", progress=meter)
    assert models.list_models() == []


def test_what_is_here_already_is_not_fetched_again(hub: Hub, meter: ProgressReporter):
    models.add_model(REPO, quant="Q4_K_M", progress=meter)
    before = len([path for path in hub.asked if path.endswith("Q4_K_M.gguf")])
    models.add_model(REPO, quant="Q4_K_M", progress=meter)
    after = len([path for path in hub.asked if path.endswith("Q4_K_M.gguf")])
    assert after - before <= 1, "a look at its checksum at most"


def test_a_file_that_arrives_broken_is_removed(hub: Hub, meter: ProgressReporter, cache: Path):
    hub.damage.add("Tiny-Q4_K_M.gguf")
    with pytest.raises(InvalidRequest, match="arrived broken"):
        models.add_model(REPO, quant="Q4_K_M", progress=meter)
    assert not list(cache.rglob("*.gguf"))
    hub.damage.clear()
    assert models.add_model(REPO, quant="Q4_K_M", progress=meter).name == "Tiny"


def test_a_repository_that_is_not_there_is_gated_or_has_no_gguf_is_a_sentence(hub: Hub, meter: ProgressReporter):
    hub.gated.add("maker/Secret")
    hub.repos["maker/Other"] = {"model.safetensors": b""}
    with pytest.raises(NotFound, match="no repository 'maker/Nothing'"):
        library_hub.fetch("maker/Nothing", None, meter)
    with pytest.raises(Forbidden, match="HF_TOKEN"):
        library_hub.fetch("maker/Secret", None, meter)
    with pytest.raises(NotFound, match="holds no GGUF file"):
        library_hub.fetch("maker/Other", None, meter)


def test_a_model_that_the_disk_has_no_room_for_is_not_begun(
    hub: Hub, meter: ProgressReporter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("modelyard.library.huggingface.shutil.disk_usage", lambda folder: SimpleNamespace(free=3))
    with pytest.raises(Unavailable, match=r"Q4_K_M needs \d+ B and .* has room for 3 B"):
        models.add_model(REPO, quant="Q4_K_M", progress=meter)
    assert not [path for path in hub.asked if "resolve" in path]


def test_a_hub_that_cannot_be_reached_is_a_sentence(monkeypatch: pytest.MonkeyPatch, meter: ProgressReporter):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match="maker/Tiny-GGUF could not be fetched: "):
        library_hub.fetch(REPO, None, meter)


def test_a_fetched_model_goes_with_its_files_and_its_neighbours_stay(hub: Hub, meter: ProgressReporter, cache: Path):
    one = models.add_model(REPO, quant="Q4_K_M", name="one", progress=meter)
    two = models.add_model(REPO, quant="UD-Q6_K_XL", name="two", progress=meter)
    models.remove_model("two")
    assert not Path(two.path).parent.exists()
    assert Path(one.path).exists()
    models.remove_model("one")
    assert not (cache / "models/maker").exists()
    assert models.list_models() == []


# Which files of a repository are which variant.


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Qwen2.5-7B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("smollm2-135m-instruct-q8_0.gguf", "Q8_0"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("BF16/Model-BF16-00001-of-00002.gguf", "BF16"),
        ("UD-Q6_K_XL/MiMo-V2-Flash-UD-Q6_K_XL-00001-of-00006.gguf", "UD-Q6_K_XL"),
        ("IQ3_XXS/model.gguf", "IQ3_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("plain.gguf", "plain"),
    ],
)
def test_the_quantization_is_read_from_the_name(name: str, label: str):
    assert [variant.label for variant in find_variants({name: 1})] == [label]


def test_a_file_that_would_land_elsewhere_is_no_file_of_ours():
    assert find_variants({"../../x.gguf": 1, "/etc/x.gguf": 1, "a/../../x.gguf": 1, "imatrix.gguf": 1}) == []


def test_two_files_of_one_quantization_are_told_apart_by_name():
    found = find_variants({"a-Q4_0.gguf": 5, "b-Q4_0.gguf": 6})
    with pytest.raises(InvalidRequest, match=r"a-Q4_0\.gguf \(5 B\), b-Q4_0\.gguf \(6 B\)"):
        choose_variant("r", found, "Q4_0")
    assert choose_variant("r", found, "B-Q4_0.gguf").files == ("b-Q4_0.gguf",)


def test_the_parts_of_a_split_variant_are_one_in_order():
    names = [f"m-Q8_0-0000{n}-of-00003.gguf" for n in (3, 1, 2)]
    (only,) = find_variants(dict.fromkeys(names, 7))
    assert (only.files, only.size) == (tuple(sorted(names)), 21)
    assert choose_variant("r", [only], None) is only
