"""The exact command line and environment of a definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from modelyard.engines.llama_server.command import command, environment, shared
from modelyard.engines.llama_server.reason import reason
from modelyard.engines.managed.listening import Listening

from modelyard.config.engine_options import engine_options, engine_spec
from modelyard.config.load import load_config
from modelyard.core.engine import CacheInfo
from modelyard.engines.llama_server import Options

SOCKET = Listening("/run/llama.sock")
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


def line(caches: dict[str, CacheInfo] | None = None, at: Listening = SOCKET, **options: Any) -> list[str]:
    chosen = Options(path="m.gguf", **options)
    return command("llama-server", Path("m.gguf"), chosen, caches or {"m": CacheInfo(4096)}, at)


def test_the_whole_definition_of_a_pool_becomes_this_command_line(tmp_path: Path) -> None:
    (tmp_path / "pool.json").write_text(json.dumps(POOL))
    config = load_config(tmp_path / "pool.json", env={}).config
    (name,) = config.models
    spec = engine_spec(config.router().catalog.models[name], config.models[name])
    options = engine_options(config.models[name])
    assert isinstance(options, Options)
    assert command(str(options.llama_server_binary), Path(options.path), options, spec.caches, SOCKET) == [
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


def test_a_bare_definition_leaves_everything_else_to_the_program() -> None:
    assert line() == [
        *("llama-server", "--model", "m.gguf", "--host", "/run/llama.sock"),
        *("--ctx-size", "4096", "--parallel", "1", "--jinja", "--no-webui"),
    ]


def test_the_window_is_one_conversations_and_the_program_is_told_all_of_them_together() -> None:
    told = line({"main": CacheInfo(8192, 3), "fast": CacheInfo(2048, 1)})
    assert told[told.index("--ctx-size") + 1] == str(8192 * 4)
    assert told[told.index("--parallel") + 1] == "4"
    assert shared({"a": CacheInfo(10, 2), "b": CacheInfo(20, 3)}) == CacheInfo(20, 5)


def test_a_port_is_named_with_its_host() -> None:
    at = Listening("127.0.0.1", 8123, "key")
    told = line(at=at)
    assert told[told.index("--host") :][:4] == ["--host", "127.0.0.1", "--port", "8123"]
    assert "key" not in " ".join(told), "every user of the machine can read a command line"
    assert environment(Options(path="m"), at, {"LLAMA_API_KEY": "foreign"})["LLAMA_API_KEY"] == "key"
    assert "LLAMA_API_KEY" not in environment(Options(path="m"), SOCKET, {"LLAMA_API_KEY": "foreign"})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"llama_server_n_gpu_layers": 20}, ["--n-gpu-layers", "20"]),
        ({"llama_server_n_gpu_layers": "all"}, ["--n-gpu-layers", "all"]),
        ({"llama_server_n_threads": 3}, ["--threads", "3"]),
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
def test_each_field_has_its_flag(fields: dict[str, Any], told: list[str]) -> None:
    assert line(**fields)[len(line()) :] == told


def test_what_a_cache_sets_for_itself_goes_before_the_models_own() -> None:
    cache = CacheInfo(64, type_k="q8_0", type_v="q4_0", n_batch=32, n_ubatch=16, n_threads=2, flash_attn=True)
    told = line({"m": cache}, llama_server_n_threads=5, llama_server_flash_attn="off")
    assert told[len(line()) :] == [
        *("--threads", "2", "--batch-size", "32", "--ubatch-size", "16", "--flash-attn", "on"),
        *("--cache-type-k", "q8_0", "--cache-type-v", "q4_0"),
    ]


def test_a_home_folder_is_spelled_out() -> None:
    assert line(llama_server_mmproj_path="~/p.gguf")[-1] == str(Path.home() / "p.gguf")


def test_variables_of_the_definition_reach_the_program() -> None:
    options = Options(path="m", llama_server_env={"CUDA_VISIBLE_DEVICES": "1"}, llama_server_library_path="/a")
    assert environment(options, SOCKET, {"CUDA_VISIBLE_DEVICES": "0"}) == {
        "CUDA_VISIBLE_DEVICES": "1",
        "LD_LIBRARY_PATH": "/a",
    }


# Why it ended, out of its last lines.

MISSING = [
    "0.00.012.975 I srv  llama_server: initializing ...",
    "0.00.076.243 W srv  llama_server: security: no API key is set",
    "0.00.077.094 E gguf_init_from_file: failed to open GGUF file '/nowhere.gguf' (No such file or directory)",
    "0.00.077.204 E llama_model_load: error loading model",
    "0.00.077.267 E gguf_init_from_file: failed to open GGUF file '/nowhere.gguf' (No such file or directory)",
    "0.00.077.274 I srv    operator(): operator(): cleaning up before exit...",
    "0.00.077.721 E srv  llama_server: exiting due to model loading error",
]


def test_the_first_errors_are_told_once_each_and_without_their_time() -> None:
    assert reason(MISSING) == (
        "gguf_init_from_file: failed to open GGUF file '/nowhere.gguf' (No such file or directory); "
        "llama_model_load: error loading model"
    )


def test_errors_without_a_time_are_known_by_their_words() -> None:
    usage = ["", "usage:", "--spec-type none,draft-simple", "", "to show complete usage, run with -h"]
    told = 'error while handling argument "--spec-type": unknown speculative type: draft'
    assert reason([told, *usage]) == told
    assert reason(["sh: 1: exec: /x: not found"]) == "sh: 1: exec: /x: not found"
    assert reason(["ggml.c:123: GGML_ASSERT(a == b) failed"]) == "ggml.c:123: GGML_ASSERT(a == b) failed"


def test_warnings_and_notes_are_no_reason() -> None:
    assert reason(MISSING[:2]) == ""
    assert reason([]) == ""


def test_no_more_than_three_are_told() -> None:
    assert reason([f"error {n}" for n in range(9)]) == "error 0; error 1; error 2"
