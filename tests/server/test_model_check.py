"""What `modelyard check` finds on a machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from modelyard.config.load import load_config
from modelyard.config.problems import ConfigError, ConfigProblem
from modelyard.config.settings import LoadedConfig
from modelyard.core.engine import MemoryEstimate
from modelyard.library.model_files import LibraryEntry, put_entry
from modelyard.plugins import MissingLibrary
from modelyard.server.memory_estimate import ModelMemory
from modelyard.server.model_check import check_models
from modelyard.telemetry.system import GpuMemory, MachineMemory
from modelyard_fake.script import FakeOptions, tokenizer_path
from tests.engines.llama_cpp import tiny_models
from tests.library.files import write_gguf

GIB = 2**30
MACHINE = MachineMemory(ram_total=8 * GIB, ram_free=GIB, ram_used_here=0)


@pytest.fixture(autouse=True)
def _separate_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("modelyard.engines.llama_cpp.selftest.require_working_library", lambda: None)


def problems(text: str, *memory: ModelMemory, machine: MachineMemory = MACHINE) -> list[ConfigProblem]:
    Path("c.toml").write_text(text)
    loaded: LoadedConfig | None
    try:
        loaded = load_config(Path("c.toml"), env={})
    except ConfigError as error:
        loaded = error.rest
        if loaded is not None:
            loaded.config = loaded.config.without_faults()
    return check_models(loaded, memory, machine) if loaded is not None else []


@pytest.mark.parametrize(
    ("text", "line", "path", "message"),
    [
        ('[models.m]\npath = "no.gguf"', 2, "path", "there is no model file 'no.gguf'; looked in"),
        ('[models.m]\npath = "bad.gguf"', 2, "path", "bad.gguf is not a readable GGUF file"),
        ('[models.m]\nbackend = "llama_cpp"\npath = "folder"', 3, "path", "folder contains no GGUF file"),
        (
            '[models.m]\npath = "ok.gguf"\ndraft_model_path = "no.gguf"',
            3,
            "draft_model_path",
            "there is no model file 'no.gguf'",
        ),
        ('[models.m]\npath = "ok.gguf"\nlora = { a = "no.gguf" }', 3, "lora.a", "there is no model file 'no.gguf'"),
        ('[models.m]\npath = "ok.gguf"\nchat_template = "no.jinja"', 3, "chat_template", "nor a file that exists"),
        (
            '[models.m]\npath = "ok.gguf"\nflash_attn = "off"\ntype_v = "q8_0"',
            4,
            "type_v",
            "need flash attention, which flash_attn turns off",
        ),
        (
            '[models.m]\nbackend = "llama_server"\npath = "ok.gguf"\nllama_server_binary = "no/llama-server"',
            4,
            "llama_server_binary",
            "there is no program 'no/llama-server'",
        ),
        (
            '[models.m]\nbackend = "llama_server"\npath = "ok.gguf"\nllama_server_mmproj_path = "no.gguf"',
            4,
            "llama_server_mmproj_path",
            "there is no file 'no.gguf'",
        ),
        (
            '[models.m]\nbackend = "vllm_serve"\npath = "./no"\nvllm_serve_binary = "no/vllm"',
            4,
            "vllm_serve_binary",
            "there is no program 'no/vllm'",
        ),
        (
            '[models.m]\nbackend = "vllm_serve"\npath = "./no"\nvllm_serve_binary = "sh"',
            3,
            "path",
            "the model './no' is not on this machine",
        ),
        (
            '[models.m]\nbackend = "openai_remote"\nremote_base_url = "http://x/v1"\nremote_model = "x"\n'
            'remote_api_key_env = "NO_SUCH_KEY"',
            5,
            "remote_api_key_env",
            "the environment variable 'NO_SUCH_KEY', which is not set",
        ),
        ('[models.m]\nbackend = "ct2"\npath = "no"', 3, "path", "there is no model 'no' (a folder with a model.bin)"),
        ('[models.m]\nbackend = "warp_drive"', 2, "backend", "is not one of the engines of this build"),
    ],
)
def test_what_a_model_lacks_is_an_error_if_requests_can_reach_it(text: str, line: int, path: str, message: str) -> None:
    write_gguf(Path("ok.gguf"))
    Path("bad.gguf").write_text("not a model")
    Path("folder").mkdir()
    found = {problem.path: problem for problem in problems(text)}
    problem = found[f"models.m.{path}"]
    assert (problem.level, problem.line) == ("error", line)
    assert message in problem.message
    assert problem.message.endswith(".")
    assert {each.level for each in problems(f"{text}\nenabled = false\nautoload = true")} == {"error"}
    assert {each.level for each in problems(f"{text}\nenabled = false")} == {"note"}


def test_an_unknown_engine_of_a_disabled_model_is_a_note_whatever_its_name_is() -> None:
    (found,) = problems('[models."qwen2.5 x"]\nbackend = "warp_drive"\nenabled = false\n')
    assert (found.path, found.level) == ('models."qwen2.5 x".backend', "note")


def test_a_model_with_invalid_options_is_checked_for_the_rest() -> None:
    found = problems('[models.m]\nbackend = "ct2"\npath = "no"\ncompute_type = "int9"\n[http]\nprot = 1\n')
    assert [(problem.path, problem.line) for problem in found] == [
        ("models.m.path", 3),
        ("models.m.compute_type", 4),
        ("http.prot", 6),
    ]


def test_a_model_that_only_the_library_has_is_no_error(tmp_path: Path) -> None:
    put_entry(LibraryEntry("extra", str(tmp_path / "gone.gguf")))
    put_entry(LibraryEntry("named", str(tmp_path / "gone.gguf")))
    found = problems('[models.m]\nbackend = "fake"\n[models.named]\npath = "gone.gguf"\n')
    assert {(problem.path, problem.level) for problem in found if problem.level != "note"} == {
        ("models.named.path", "error")
    }


def test_the_default_model_is_fetched_at_start_and_its_absence_is_no_error() -> None:
    (found,) = problems("")
    assert (found.path, found.level) == ("models.smollm2.path", "note")
    assert "modelyard serve fetches it (94 MiB)" in found.message


def test_a_library_that_the_first_start_sets_up_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingLibrary("there is none")

    monkeypatch.setattr("modelyard.engines.llama_cpp.selftest.require_working_library", missing)
    found = {problem.path: problem.level for problem in problems('[models.m]\npath = "no.gguf"')}
    assert found == {"models.m.backend": "note", "models.m.path": "error"}
    (found_ct2,) = problems('[models.m]\nbackend = "exllamav3"\npath = "."\n')[:1]
    assert found_ct2.level == "error"  # nothing sets up the library of this one


def test_an_interpreter_that_cannot_run_the_engine_is_an_error(tmp_path: Path) -> None:
    lacking = tmp_path / "python"
    lacking.write_text("#!/bin/sh\necho '[[3, 12], [\"zmq\"]]'\n")
    lacking.chmod(0o755)
    (found,) = problems(f'[models.m]\nbackend = "fake"\npython = "{lacking}"')
    assert (found.path, found.level) == ("models.m.python", "error")
    assert "pip install pyzmq" in found.message
    assert problems(f'[models.m]\nbackend = "fake"\npython = "{sys.executable}"') == []


def test_a_format_that_a_models_own_template_replaces_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "vocabulary").mkdir()
    for file in tokenizer_path(FakeOptions()).iterdir():
        (tmp_path / "vocabulary" / file.name).write_bytes(file.read_bytes())
    text = '[models.m]\nbackend = "fake"\ntokenizer_path = "vocabulary"\nprompt_format = "qwen3"'
    assert problems(text) == []
    (tmp_path / "vocabulary" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (found,) = problems(text)
    assert (found.line, found.path, found.level) == (4, "models.m.prompt_format", "note")
    assert found.message == "qwen3 is not used: the model has a template of its own."
    (tmp_path / "vocabulary" / "chat_template.jinja").write_text("{% if %}")
    assert "To use prompt_format instead, set force_prompt_format = true" in problems(text)[0].message


def test_a_missing_chat_template_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODELYARD_CACHE")
    (found,) = problems(f'[models.m]\npath = "{tiny_models.base_coder()}"\n')
    assert (found.path, found.level) == ("models.m.chat_template", "note")
    assert found.message.startswith("the model 'm' has no chat template in ")
    assert found.message.endswith("(/v1/completions).")
    assert problems(f'[models.m]\npath = "{tiny_models.base_coder()}"\nprompt_format = "generic"\n') == []
    assert problems(f'[models.m]\npath = "{tiny_models.bert()}"\n') == []  # it generates nothing


def test_an_incomplete_file_is_an_error() -> None:
    write_gguf(Path("part.gguf"))  # it has only the header
    (found,) = problems('[models.m]\npath = "part.gguf"')
    assert "part.gguf is incomplete" in found.message


# --- memory -----------------------------------------------------------------------------------------------------------

FAKE = '[models.m]\nbackend = "fake"\n'


def memory(gib: float, device: str = "cpu", name: str = "m") -> ModelMemory:
    return ModelMemory(name, MemoryEstimate(int(gib * GIB), device=device))


def test_a_model_that_exceeds_the_machine_is_an_error_with_the_numbers() -> None:
    (found,) = problems(FAKE, memory(9))
    assert (found.path, found.level) == ("models.m", "error")
    assert "needs about 9.0 GiB (weights 9.0 GiB), and this machine has 8.0 GiB of RAM" in found.message
    assert problems(FAKE, memory(7)) == []  # what else is loaded now does not matter


def test_a_model_that_exceeds_the_limit_is_an_error() -> None:
    (found,) = problems(FAKE + '[scheduler]\nmemory_limit = "2GiB"', memory(3))
    assert "scheduler.memory_limit allows 2.0 GiB" in found.message


def test_a_gpu_has_its_own_size_and_limit() -> None:
    gpu = GpuMemory(uuid="g", name="G", total=4 * GIB, used=0, free=4 * GIB)
    machine = MachineMemory(ram_total=8 * GIB, ram_free=GIB, ram_used_here=0, gpus=(gpu,))
    assert problems(FAKE, memory(3, "gpu"), machine=machine) == []
    (found,) = problems(FAKE, memory(5, "gpu"), machine=machine)
    assert "this machine has 4.0 GiB" in found.message
    (found,) = problems(FAKE + '[scheduler]\ngpu_memory_limit = "2GiB"', memory(3, "gpu"), machine=machine)
    assert "scheduler.gpu_memory_limit allows 2.0 GiB" in found.message


def test_models_that_do_not_fit_together_take_turns() -> None:
    text = FAKE + '[models.n]\nbackend = "fake"\n'
    (found,) = problems(text, memory(5), memory(5, name="n"))
    assert found.level == "warning"
    assert "need about 10.0 GiB together, and 8.0 GiB can be used: they take turns" in found.message
    assert problems(text + "enabled = false", memory(5), memory(5, name="n")) == []


# --- the server -------------------------------------------------------------------------------------------------------


def test_an_open_address_needs_keys() -> None:
    (found,) = problems(FAKE + '[http]\nhost = "0.0.0.0"')
    assert (found.path, found.level) == ("http.host", "error")
    assert "needs an API key" in found.message


def test_a_certificate_that_cannot_be_used_is_an_error() -> None:
    for name in ("cert.pem", "key.pem"):
        Path(name).write_text("nothing")
    (found,) = problems(FAKE + '[http]\nssl_certfile = "cert.pem"\nssl_keyfile = "key.pem"')
    assert (found.path, found.level) == ("http.ssl_certfile", "error")


def test_folders_must_be_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    found = problems(FAKE + '[store]\nbackend = "sqlite"\npath = "file/store.sqlite"\n[log]\ndebug_dir = "new/debug"')
    assert [problem.path for problem in found] == ["store.path", "log.debug_dir"]
    assert "file is a file, not a folder" in found[0].message
    assert "cannot be written by this user" in found[1].message
