"""The self-test: stages and faults of the child, explanations of the parent, and remembered passes."""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelyard import libllama
from modelyard.core.errors import Unavailable
from modelyard.engines import llama_cpp
from modelyard.engines.llama_cpp import selftest
from modelyard.engines.llama_cpp import selftest as tiny
from modelyard.engines.llama_cpp.selftest import explain_failure
from modelyard.libllama import CONTEXT_DEFAULTS, MODEL_DEFAULTS
from modelyard.plugins import MissingLibrary


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    tiny.write_tiny_model(path)
    return path


def test_each_stage_is_printed_before_it_begins(model: Path, capsys: pytest.CaptureFixture[str]):
    assert selftest.main(["--model", str(model)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "stage loading the library",
        f"version {libllama.load().version}",
        "stage comparing its structs",
        "stage decoding a tiny model",
        "stage reading a vocabulary",
        "stage decoding tiny.gguf",
        "passed",
    ]


def test_a_library_without_a_function_of_ours_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(libllama, "_loaded", None)
    monkeypatch.setitem(libllama._FUNCTIONS, "llama_future", (None, []))
    assert selftest.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("it has no function llama_future")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the calling convention of x86-64 shows the size")
@pytest.mark.parametrize("name", ["llama_context_params", "llama_model_params"])
@pytest.mark.parametrize("difference", [-8, 8])
def test_a_struct_of_another_size_is_a_fault(
    name: str, difference: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    sizes = selftest.chosen_sizes(libllama.load())
    monkeypatch.setattr(selftest, "chosen_sizes", lambda _: sizes | {name: sizes[name] + difference})
    assert selftest.main([]) == 1
    found = capsys.readouterr().out
    assert f"fault {name.replace('params', 'default_params')} writes " in found
    assert f"bytes where the struct has {sizes[name] + difference}" in found


@pytest.mark.parametrize(("defaults", "field"), [(CONTEXT_DEFAULTS, "n_ctx"), (MODEL_DEFAULTS, "use_extra_bufts")])
def test_other_defaults_are_a_fault(
    defaults: dict[str, object], field: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(defaults, field, 4711)
    assert selftest.main([]) == 1
    assert f".{field} is " in capsys.readouterr().out


def test_each_layout_is_recognized_by_where_its_defaults_are() -> None:
    """As a later release fills the struct in: one more field before the booleans."""
    for layout in libllama.CONTEXT_LAYOUTS.values():
        params = layout(**libllama.CONTEXT_DEFAULTS)
        data = bytes(params) + bytes(512 - ctypes.sizeof(params))
        function = lambda data=data: libllama._AnyParams.from_buffer_copy(data)  # noqa: E731
        library: Any = SimpleNamespace(llama_context_default_params=function, _name="other")
        assert libllama.context_layout(library, Path("other")) is layout
    shifted: Any = SimpleNamespace(llama_context_default_params=lambda: libllama._AnyParams(), _name="other")
    with pytest.raises(MissingLibrary, match="does not know: llama_context_params"):
        libllama.context_layout(shifted, Path("other"))


def test_a_field_that_is_missing_anywhere_is_a_fault() -> None:
    """The struct of the library beside ours without one field: all that follows is shifted. v1.0 lacks `defrag_thold`,
    where padding takes its place; after the hidden ones come padding, or values that are equal."""
    hidden = {"yarn_orig_ctx", "defrag_thold", "type_k", "type_v", "kv_unified", "ctx_other"} | {
        *("no_host", "no_alloc", "load_mtp")
    }
    library = libllama.load()
    for params, defaults in (
        (library.llama_context_default_params(), CONTEXT_DEFAULTS),
        (library.llama_model_default_params(), MODEL_DEFAULTS),
    ):
        data, fields = bytes(params) + bytes(64), list(params._fields_)
        for at, (name, *_) in enumerate(fields):
            if name in hidden:
                continue
            shifted = type("shifted", (ctypes.Structure,), {"_fields_": (*fields[:at], *fields[at + 1 :])})
            found = shifted.from_buffer_copy(data)
            known = {field: value for field, value in defaults.items() if field != name}
            sizes = ctypes.sizeof(shifted) <= ctypes.sizeof(params) - 8  # what the extent of the writes tells
            assert sizes or selftest.first_difference("params", found, known) is not None, name


def test_fields_that_change_places_are_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their defaults are equal: only a context that was made with them tells."""
    library, path = libllama.load(), tmp_path / "tiny.gguf"
    selftest.write_tiny_model(path)
    fields = dict(library.llama_context_params._fields_)
    names = ["n_threads_batch" if n == "n_threads" else "n_threads" if n == "n_threads_batch" else n for n in fields]
    swapped = type("llama_context_params", (ctypes.Structure,), {"_fields_": tuple((n, fields[n]) for n in names)})
    declared = libllama.declared
    monkeypatch.setattr(
        library,
        "llama_context_default_params",
        declared(ctypes.CDLL(str(library.path)), "llama_context_default_params", (swapped, [])),
    )
    monkeypatch.setattr(
        library,
        "llama_init_from_model",
        declared(
            ctypes.CDLL(str(library.path)), "llama_init_from_model", (ctypes.c_void_p, [ctypes.c_void_p, swapped])
        ),
    )
    assert "n_threads is 5 and not 3" in (selftest._read_back(path) or "")
    monkeypatch.undo()
    assert selftest._read_back(path) is None


def test_words_that_come_back_changed_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    library = libllama.load()
    monkeypatch.setattr(library, "llama_token_to_piece", lambda *_: 0)
    assert "its tokenizer makes b''" in (selftest._read_vocabulary() or "")


def test_the_first_field_that_differs_is_named():
    found = SimpleNamespace(a=1, b=0)
    assert selftest.first_difference("s", found, {"a": 1, "b": 2}) == "s.b is 0 where the supported releases have 2"
    assert selftest.first_difference("s", found, {"a": 1}) is None


def test_a_model_that_cannot_be_loaded_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert selftest.main(["--model", str(tmp_path / "none.gguf")]) == 1
    assert "none.gguf cannot be loaded or decoded" in capsys.readouterr().out


def test_kernels_that_disagree_are_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(selftest, "_decode", lambda path, fast: [1.0, 0.0] if fast else [0.0, 1.0])
    assert selftest.main([]) == 1
    assert "the fast kernels compute something else than the generic ones (0.000)" in capsys.readouterr().out


def test_logits_that_are_not_finite_are_a_fault(
    monkeypatch: pytest.MonkeyPatch, model: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(selftest, "_decode_tiny_model", lambda: None)
    monkeypatch.setattr(selftest, "_decode", lambda path, fast: [float("nan")])
    assert selftest.main(["--model", str(model)]) == 1
    assert "gives logits that are not finite" in capsys.readouterr().out


def test_the_kernels_of_every_type_of_weights_agree(model: Path):
    fast, plain = selftest._decode(model, fast=True), selftest._decode(model, fast=False)
    assert fast is not None
    assert plain is not None
    assert len(fast) == tiny.VOCAB
    assert selftest.cosine(fast, plain) > 0.99


def test_cosine_compares_directions():
    assert selftest.cosine([1.0, 2.0], [2.0, 4.0]) == pytest.approx(1)
    assert selftest.cosine([1.0, 0.0], [-1.0, 0.0]) == -1
    assert selftest.cosine([float("nan")], [1.0]) == 0
    assert selftest.cosine([0.0], [0.0]) == 0


def test_the_tiny_model_is_the_same_every_time_and_small(model: Path, tmp_path: Path):
    tiny.write_tiny_model(tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == model.read_bytes()
    assert model.stat().st_size < 3_000_000


# --- the parent -------------------------------------------------------------------------------------------------------

STAGE = "print('stage decoding a tiny model', flush=True)"


def child(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, sys, threading\n{STAGE}\n{code}"]


def text_of(code: str, timeout: float = 60) -> str:
    fault = selftest.run_selftest(child(code), timeout)
    assert fault is not None
    assert "\n" not in fault
    return fault


# --- how a child ends -------------------------------------------------------------------------------------------------


def test_death_by_sigill_is_explained_with_what_to_do():
    fault = text_of("os.kill(os.getpid(), signal.SIGILL)")
    assert "died while decoding a tiny model: SIGILL, an instruction that this CPU does not have" in fault
    assert "`modelyard setup --build`" in fault
    assert "CMAKE_ARGS=-DGGML_NATIVE=OFF" in fault


def test_another_signal_is_named():
    assert "died while decoding a tiny model: SIGSEGV" in text_of("os.kill(os.getpid(), signal.SIGSEGV)")


def test_a_child_that_hangs_is_stopped():
    assert "hung for 1 s while" in text_of("threading.Event().wait()", timeout=1)


def test_a_fault_of_the_child_is_reported():
    fault = text_of("print('fault llama_batch has 64 bytes where release 0.3.36 has 56'); sys.exit(1)")
    assert fault.startswith("the llama.cpp library does not fit this program: llama_batch has 64 bytes where release")


def test_a_python_error_of_the_child_is_reported_by_its_last_line():
    assert "failed while decoding a tiny model: OSError: no libllama.so" in text_of("raise OSError('no libllama.so')")


def test_a_silent_child_is_reported_by_its_exit_code():
    assert "the llama.cpp library failed while starting: exit code 9; " in str(explain_failure(9, 1))


def test_an_unknown_signal_is_reported_by_its_number():
    assert "signal 40" in str(explain_failure(-40, 1))


def test_a_child_that_passes_is_no_fault():
    assert selftest.run_selftest(child("print('passed')")) is None


def test_the_real_library_passes():
    assert selftest.run_selftest() is None


# --- remembering ------------------------------------------------------------------------------------------------------


class Examiner:
    def __init__(self, *faults: str | None) -> None:
        self.faults = list(faults)
        self.asked = 0

    def __call__(self) -> str | None:
        self.asked += 1
        return self.faults.pop(0)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    library = tmp_path / "lib"
    library.mkdir()
    (library / "libllama.so").write_bytes(b"machine code")
    return {"MODELYARD_CACHE": str(tmp_path / "cache"), "LLAMA_CPP_LIB_PATH": str(library)}


def test_a_pass_is_remembered(env: dict[str, str]):
    examiner = Examiner(None)
    selftest.require_working_library(env, examiner)
    selftest.require_working_library(env, examiner)
    assert examiner.asked == 1


def test_a_failure_is_raised_and_not_remembered(env: dict[str, str]):
    examiner = Examiner("it died", None)
    with pytest.raises(Unavailable, match="it died") as caught:
        selftest.require_working_library(env, examiner)
    assert caught.value.code == "engine_broken"
    selftest.require_working_library(env, examiner)
    assert examiner.asked == 2


def test_another_library_is_tested_again(env: dict[str, str]):
    examiner = Examiner(None, None)
    selftest.require_working_library(env, examiner)
    (Path(env["LLAMA_CPP_LIB_PATH"]) / "libllama.so").write_bytes(b"other machine code")
    selftest.require_working_library(env, examiner)
    assert examiner.asked == 2


def test_another_cpu_is_tested_again(env: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    folder = Path(env["LLAMA_CPP_LIB_PATH"])
    before = selftest.fingerprint(folder)
    assert selftest.fingerprint(folder) == before
    monkeypatch.setattr(selftest, "cpu_description", lambda: "one without AVX-512")
    assert selftest.fingerprint(folder) != before


def test_a_library_is_tested_again_when_our_declarations_change(env: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    before = selftest.fingerprint(Path(env["LLAMA_CPP_LIB_PATH"]))
    monkeypatch.setattr(selftest, "struct_sizes", lambda: {"llama_batch": 64})
    assert selftest.fingerprint(Path(env["LLAMA_CPP_LIB_PATH"])) != before


def test_a_cpu_is_described_by_its_name_and_instructions(tmp_path: Path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: X\ncpu MHz\t: 2100\nflags\t: avx\n\nmodel name\t: X\nflags\t: avx\n")
    assert selftest.cpu_description(info) == "model name\t: X\nflags\t: avx"
    assert selftest.cpu_description(tmp_path / "none")


def test_a_read_only_cache_folder_is_not_a_fault(env: dict[str, str], tmp_path: Path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    examiner = Examiner(None, None)
    selftest.require_working_library(env, examiner)
    selftest.require_working_library(env, examiner)
    assert examiner.asked == 2


def test_no_engine_is_created_with_a_broken_library(monkeypatch: pytest.MonkeyPatch):
    def broken() -> None:
        raise selftest.BrokenLibrary("it died by SIGILL")

    monkeypatch.setattr(selftest, "require_working_library", broken)
    with pytest.raises(Unavailable, match="SIGILL"):
        llama_cpp.create(None)  # type: ignore[arg-type]
