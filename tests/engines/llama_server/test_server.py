"""The command line, the environment and the failure reasons of llama-server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelyard.config.load import load_config
from modelyard.config.settings import engine_options, engine_spec
from modelyard.core.engine import CacheInfo
from modelyard.engines.llama_server import Options
from modelyard.engines.llama_server.server import combined_cache, command_line, environment, failure_reason
from modelyard.engines.managed import ListenAddress
from modelyard.library import cores
from modelyard.prompt.template_source import builtin
from tests.library.files import write_gguf

SOCKET = ListenAddress("/run/llama.sock")
POOL = {
    "engine": {
        "models": {
            "gemma-4-26b-a4b-it-ud-q5ks-llama-server": {
                "backend": "llama_server",
                "model_path": "/models/gemma-4-26B-A4B-it-UD-Q5_K_S.gguf",
                "prompt_format": "gemma4_template",
                "modalities": ["text", "image"],
                "enable_thinking": False,
                "llama_server_binary": "/opt/llama.cpp/bin/llama-server",
                "llama_server_library_path": ["/opt/llama.cpp/lib"],
                "llama_server_n_ctx": 4096,
                "llama_server_n_gpu_layers": "-1",
                "llama_server_flash_attn": "on",
                "llama_server_mmproj_path": "/models/mmproj-model-f16.gguf",
                "llama_server_image_max_tokens": 512,
                "llama_server_draft_model_path": "/models/gemma-4-26B-A4B-it-UD-Q5_K_S.gguf",
                "llama_server_spec_type": "draft",
                "llama_server_spec_draft_n_max": 5,
                "llama_server_spec_draft_p_min": 0.1,
                "llama_server_spec_draft_ngl": "-1",
                "llama_server_reasoning": "none",
                "replicas": 1,
                "replica_max": 1,
                "target_inflight": 1,
                "enabled": False,
            }
        }
    }
}


def line(caches: dict[str, CacheInfo] | None = None, address: ListenAddress = SOCKET, **options: Any) -> list[str]:
    chosen = Options(path="m.gguf", **options)
    return command_line("llama-server", Path("m.gguf"), chosen, caches or {"m": CacheInfo(4096)}, address)


def test_complete_definition_becomes_a_command_line(tmp_path: Path) -> None:
    (tmp_path / "pool.json").write_text(json.dumps(POOL))
    config = load_config(tmp_path / "pool.json", env={}).config
    (name,) = config.models
    spec = engine_spec(config.router().catalog.models[name])
    options = engine_options(config.models[name])
    assert isinstance(options, Options)
    assert command_line(str(options.llama_server_binary), Path(options.path), options, spec.caches, SOCKET) == [
        *("/opt/llama.cpp/bin/llama-server", "--model", "/models/gemma-4-26B-A4B-it-UD-Q5_K_S.gguf"),
        *("--host", "/run/llama.sock", "--ctx-size", "4096", "--parallel", "1", "--jinja", "--no-webui"),
        *("--n-gpu-layers", "-1", "--flash-attn", "on"),
        *("--mmproj", "/models/mmproj-model-f16.gguf", "--image-max-tokens", "512"),
        *("--model-draft", "/models/gemma-4-26B-A4B-it-UD-Q5_K_S.gguf", "--spec-type", "draft-simple"),
        *("--spec-draft-n-max", "5", "--spec-draft-p-min", "0.1", "--spec-draft-ngl", "-1", "--reasoning", "off"),
    ]
    assert spec.modalities == ("text", "image")
    assert options.enable_thinking is False
    env = environment(options, SOCKET, {"LD_LIBRARY_PATH": "/usr/lib", "HOME": "/h"})
    assert env == {"LD_LIBRARY_PATH": "/opt/llama.cpp/lib:/usr/lib", "HOME": "/h"}


@pytest.mark.parametrize(
    ("file", "force", "given"), [("plain.gguf", False, True), ("own.gguf", False, False), ("own.gguf", True, True)]
)
def test_a_named_format_is_for_a_file_without_a_template_or_forced(
    tmp_path: Path, file: str, force: bool, given: bool
) -> None:
    write_gguf(tmp_path / file, template="{{ own }}" if file == "own.gguf" else None)
    model = {"backend": "llama_server", "path": str(tmp_path / file), "prompt_format": "qwen3"}
    overrides = {"models": {"m": model | {"force_prompt_format": force}}}
    options = engine_options(load_config(env={}, overrides=overrides).config.models["m"])
    assert isinstance(options, Options)
    argv = command_line("llama-server", Path("m"), options, {"m": CacheInfo(4096)}, SOCKET)
    assert (builtin("qwen3") in argv) is given


def test_minimal_definition_sets_no_optional_flags() -> None:
    assert line() == [
        *("llama-server", "--model", "m.gguf", "--host", "/run/llama.sock"),
        *("--ctx-size", "4096", "--parallel", "1", "--jinja", "--no-webui"),
    ]


def test_context_size_is_the_window_times_all_slots() -> None:
    argv = line({"main": CacheInfo(8192, 3), "fast": CacheInfo(2048, 1)})
    assert argv[argv.index("--ctx-size") + 1] == str(8192 * 4)
    assert argv[argv.index("--parallel") + 1] == "4"
    assert combined_cache({"a": CacheInfo(10, 2), "b": CacheInfo(20, 3)}) == CacheInfo(20, 5)


def test_port_is_passed_with_its_host_and_the_key_is_not() -> None:
    address = ListenAddress("127.0.0.1", 8123, "key")
    argv = line(address=address)
    assert argv[argv.index("--host") :][:4] == ["--host", "127.0.0.1", "--port", "8123"]
    assert "key" not in " ".join(argv), "every user of the machine can read a command line"
    assert environment(Options(path="m"), address, {"LLAMA_API_KEY": "foreign"})["LLAMA_API_KEY"] == "key"
    assert "LLAMA_API_KEY" not in environment(Options(path="m"), SOCKET, {"LLAMA_API_KEY": "foreign"})


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({"llama_server_n_gpu_layers": 20}, ["--n-gpu-layers", "20"]),
        ({"llama_server_n_gpu_layers": "all"}, ["--n-gpu-layers", "all"]),
        ({"llama_server_n_threads": 3}, ["--threads", "3"]),
        ({"llama_server_n_threads": 512}, ["--threads", "16"]),
        ({"llama_server_n_threads_batch": 2}, ["--threads-batch", "2"]),
        ({"llama_server_flash_attn": False}, ["--flash-attn", "off"]),
        ({"llama_server_reasoning": "auto"}, ["--reasoning", "auto"]),
        ({"llama_server_spec_type": "mtp"}, ["--spec-type", "draft-mtp"]),
        ({"llama_server_spec_type": "ngram-mod,draft"}, ["--spec-type", "ngram-mod,draft-simple"]),
        ({"llama_server_extra_args": ["--mlock", "-ub", "256"]}, ["--mlock", "-ub", "256"]),
        ({"llama_server_extra_args": "--mlock"}, ["--mlock"]),
        ({"chat_template": "{{ messages }}"}, ["--chat-template", "{{ messages }}"]),
        ({"chat_template": "/my/template.jinja"}, ["--chat-template-file", "/my/template.jinja"]),
    ],
)
def test_each_field_has_its_flag(fields: dict[str, Any], flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "logical", lambda: 16)
    assert line(**fields)[len(line()) :] == flags


def test_a_server_gets_the_threads_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "physical_if_limited", lambda: 1)
    argv = line()
    assert argv[argv.index("--threads") :][:2] == ["--threads", "1"]


def test_fields_of_the_cache_override_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "logical", lambda: 16)
    cache = CacheInfo(64, type_k="q8_0", type_v="q4_0", n_batch=32, n_ubatch=16, n_threads=2, flash_attn=True)
    argv = line({"m": cache}, llama_server_n_threads=5, llama_server_flash_attn="off")
    assert argv[len(line()) :] == [
        *("--threads", "2", "--batch-size", "32", "--ubatch-size", "16", "--flash-attn", "on"),
        *("--cache-type-k", "q8_0", "--cache-type-v", "q4_0"),
    ]


def test_home_folder_is_expanded() -> None:
    assert line(llama_server_mmproj_path="~/p.gguf")[-1] == str(Path.home() / "p.gguf")


def test_environment_variables_are_passed() -> None:
    options = Options(path="m", llama_server_env={"CUDA_VISIBLE_DEVICES": "1"}, llama_server_library_path="/a")
    assert environment(options, SOCKET, {"CUDA_VISIBLE_DEVICES": "0"}) == {
        "CUDA_VISIBLE_DEVICES": "1",
        "LD_LIBRARY_PATH": "/a",
    }


# --- failure reasons --------------------------------------------------------------------------------------------------

MISSING = [
    "0.00.012.975 I srv  llama_server: initializing ...",
    "0.00.076.243 W srv  llama_server: security: no API key is set",
    "0.00.077.094 E gguf_init_from_file: failed to open GGUF file '/nowhere.gguf' (No such file or directory)",
    "0.00.077.204 E llama_model_load: error loading model",
    "0.00.077.267 E gguf_init_from_file: failed to open GGUF file '/nowhere.gguf' (No such file or directory)",
    "0.00.077.274 I srv    operator(): operator(): cleaning up before exit...",
    "0.00.077.721 E srv  llama_server: exiting due to model loading error",
]


def test_first_errors_are_reported_once_without_time_stamps() -> None:
    assert failure_reason(MISSING) == (
        "gguf_init_from_file: failed to open GGUF file '/nowhere.gguf' (No such file or directory); "
        "llama_model_load: error loading model"
    )


def test_errors_without_a_time_stamp_are_found_by_keywords() -> None:
    usage = ["", "usage:", "--spec-type none,draft-simple", "", "to show complete usage, run with -h"]
    error = 'error while handling argument "--spec-type": unknown speculative type: draft'
    assert failure_reason([error, *usage]) == error
    assert failure_reason(["sh: 1: exec: /x: not found"]) == "sh: 1: exec: /x: not found"
    assert failure_reason(["ggml.c:123: GGML_ASSERT(a == b) failed"]) == "ggml.c:123: GGML_ASSERT(a == b) failed"


def test_warnings_are_not_reasons() -> None:
    assert failure_reason(MISSING[:2]) == ""
    assert failure_reason([]) == ""


def test_at_most_three_errors_are_reported() -> None:
    assert failure_reason([f"error {n}" for n in range(9)]) == "error 0; error 1; error 2"
