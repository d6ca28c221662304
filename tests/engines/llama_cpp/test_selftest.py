"""The self-test on the real library: it passes as it is, and sees what is changed under it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from modelyard.engines.llama_cpp import selftest
from modelyard.engines.llama_cpp import selftest as tiny
from modelyard.engines.llama_cpp.library import CONTEXT_DEFAULTS, MODEL_DEFAULTS, SIZES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    tiny.write_tiny_model(path)
    return path


def test_each_stage_is_said_before_it_begins_and_the_end_is_a_pass(model: Path, capsys: pytest.CaptureFixture[str]):
    assert selftest.main(["--model", str(model)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "stage loading the library",
        "stage comparing its structs",
        "stage decoding a tiny model",
        "stage decoding tiny.gguf",
        "passed",
    ]


def test_another_release_is_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("llama_cpp.__version__", "0.3.1")
    assert selftest.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("fault llama-cpp-python is 0.3.1, and this program")


@pytest.mark.parametrize("name", SIZES)
def test_a_struct_of_another_size_is_a_fault(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(SIZES, name, SIZES[name] + 8)
    assert selftest.main([]) == 1
    assert f"fault {name} has {SIZES[name] - 8} bytes where release" in capsys.readouterr().out


@pytest.mark.parametrize(("defaults", "field"), [(CONTEXT_DEFAULTS, "n_ctx"), (MODEL_DEFAULTS, "use_extra_bufts")])
def test_other_defaults_are_a_fault(
    defaults: dict[str, object], field: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(defaults, field, 4711)
    assert selftest.main([]) == 1
    assert f".{field} is " in capsys.readouterr().out


def test_the_first_field_that_differs_is_named():
    found = SimpleNamespace(a=1, b=0)
    assert selftest.first_difference("s", found, {"a": 1, "b": 2}) == f"s.b is 0 where release {selftest.RELEASE} has 2"
    assert selftest.first_difference("s", found, {"a": 1}) is None


def test_a_model_that_cannot_be_loaded_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert selftest.main(["--model", str(tmp_path / "none.gguf")]) == 1
    assert "none.gguf cannot be loaded or decoded" in capsys.readouterr().out


def test_kernels_that_disagree_are_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(selftest, "_decode", lambda path, fast: [1.0, 0.0] if fast else [0.0, 1.0])
    assert selftest.main([]) == 1
    assert "the fast kernels compute something else than the plain ones (0.000)" in capsys.readouterr().out


def test_logits_that_are_no_numbers_are_a_fault(
    monkeypatch: pytest.MonkeyPatch, model: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(selftest, "_decode_tiny", lambda: None)
    monkeypatch.setattr(selftest, "_decode", lambda path, fast: [float("nan")])
    assert selftest.main(["--model", str(model)]) == 1
    assert "gives logits that are no numbers" in capsys.readouterr().out


def test_the_kernels_of_every_type_of_weights_agree(model: Path):
    fast, plain = selftest._decode(model, fast=True), selftest._decode(model, fast=False)
    assert fast is not None
    assert plain is not None
    assert len(fast) == tiny.VOCAB
    assert selftest.cosine(fast, plain) > 0.99


def test_two_runs_are_alike_by_their_direction():
    assert selftest.cosine([1.0, 2.0], [2.0, 4.0]) == pytest.approx(1)
    assert selftest.cosine([1.0, 0.0], [-1.0, 0.0]) == -1
    assert selftest.cosine([float("nan")], [1.0]) == 0
    assert selftest.cosine([0.0], [0.0]) == 0


def test_the_tiny_model_is_the_same_every_time_and_small(model: Path, tmp_path: Path):
    tiny.write_tiny_model(tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == model.read_bytes()
    assert model.stat().st_size < 3_000_000
