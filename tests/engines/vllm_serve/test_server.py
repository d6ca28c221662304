"""The command line, the parsers and the environment of vllm serve."""

from __future__ import annotations

from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import CacheInfo
from modelyard.engines.managed import ListenAddress
from modelyard_vllm.serve import Options
from modelyard_vllm.serve.server import (
    ServedModel,
    command_line,
    environment,
    reasoning_parser,
    switches_thinking,
    tool_call_parser,
)
from tests.engines.vllm.test_options import pool_spec

SOCKET = ListenAddress("/run/vllm.sock")
MINIMAL = Options(vllm_model="m")
MINIMAL_LINE = [
    *("vllm", "serve", "/found/m", "--uds", "/run/vllm.sock", "--served-model-name", "m"),
    *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
    *("--max-model-len", "4096", "--max-num-seqs", "1", "--dtype", "auto"),
]


def line(address: ListenAddress = SOCKET, template: str | None = None, **options: Any) -> list[str]:
    model = ServedModel("m", "/found/m", template)
    return command_line("vllm", model, Options(vllm_model="m", **options), {"m": CacheInfo(4096)}, address)


def added(**options: Any) -> list[str]:
    """The arguments that the fields add to a minimal definition."""
    got = line(**options)
    steps = SequenceMatcher(None, MINIMAL_LINE, got, autojunk=False).get_opcodes()
    return [argument for what, _, _, begin, end in steps if what != "equal" for argument in got[begin:end]]


def test_definition_with_an_mtp_assistant_becomes_a_command_line(tmp_path: Path) -> None:
    spec = pool_spec(tmp_path, "gemma4-nvfp4-vllm-serve")
    options = spec.options
    served = ServedModel(spec.model, options.model_name)
    assert command_line(options.vllm_serve_binary, served, options, spec.caches, SOCKET) == [
        *("/opt/vllm/bin/vllm", "serve", "/models/nvidia/Gemma-4-26B-A4B-NVFP4", "--uds", "/run/vllm.sock"),
        *("--served-model-name", "gemma4-nvfp4-vllm-serve"),
        *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
        *("--max-model-len", "8192", "--dtype", "auto"),
        *("--gpu-memory-utilization", "0.01", "--kv-cache-memory-bytes", "2147483648"),
        *("--limit-mm-per-prompt", '{"image":1}', "--mm-processor-kwargs", '{"max_pixels":4014080}'),
        "--speculative-config",
        '{"method":"mtp","model":"google/gemma-4-26B-A4B-it-assistant","num_speculative_tokens":8}',
        *("--max-num-seqs", "1"),
    ]
    env = environment(options, SOCKET, {"LD_LIBRARY_PATH": "/usr/lib", "HOME": "/h"})
    assert env["LD_LIBRARY_PATH"] == "/opt/cuda/lib64:/usr/lib"
    assert env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert env["HOME"] == "/h"


def test_definition_with_mtp_layers_becomes_a_command_line(tmp_path: Path) -> None:
    spec = pool_spec(tmp_path, "qwen3.6-35b-a3b-nvfp4-vllm-serve")
    options = spec.options
    served = ServedModel(spec.model, options.model_name, "… {{ enable_thinking }} <think> <tool_call> <function=")
    assert command_line(options.vllm_serve_binary, served, options, spec.caches, SOCKET) == [
        *("/opt/vllm-qwen/bin/vllm", "serve", "/models/nvidia/Qwen3.6-35B-A3B-NVFP4", "--uds", "/run/vllm.sock"),
        *("--served-model-name", "qwen3.6-35b-a3b-nvfp4-vllm-serve"),
        *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder"),
        *("--max-model-len", "8192", "--dtype", "auto"),
        *("--gpu-memory-utilization", "0.01", "--kv-cache-memory-bytes", "1073741824", "--kv-cache-dtype", "fp8"),
        "--trust-remote-code",
        *("--limit-mm-per-prompt", '{"image":1}', "--mm-processor-kwargs", '{"max_pixels":4014080}'),
        "--speculative-config",
        '{"method":"mtp","num_speculative_tokens":1,"moe_backend":"triton","attention_backend":"triton_attn"}',
        *("--quantization", "modelopt", "--attention-backend", "triton_attn", "--moe-backend", "marlin"),
        *("--load-format", "fastsafetensors", "--max-num-seqs", "1", "--max-num-batched-tokens", "2048"),
        *("--reasoning-parser", "qwen3", "--default-chat-template-kwargs", '{"enable_thinking": false}'),
        *("--linear-backend", "cutlass"),
    ]
    assert options.vllm_serve_start_timeout_s == 900.0
    assert options.enable_thinking is False
    env = environment(options, SOCKET, {})
    assert env["LD_LIBRARY_PATH"].count("/opt/vllm-qwen/lib/python3.12/site-packages/nvidia/") == 2
    assert env["VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"] == "0"


def test_minimal_definition_sets_no_optional_flags() -> None:
    assert line() == MINIMAL_LINE


def test_port_is_passed_with_its_host_and_the_key_is_not() -> None:
    address = ListenAddress("127.0.0.1", 8123, "secret")
    assert line(address)[3:7] == ["--host", "127.0.0.1", "--port", "8123"]
    assert "secret" not in " ".join(line(address)), "every user of the machine can read a command line"
    assert environment(Options(vllm_model="m"), address, {"VLLM_API_KEY": "foreign"})["VLLM_API_KEY"] == "secret"
    assert "VLLM_API_KEY" not in environment(Options(vllm_model="m"), SOCKET, {"VLLM_API_KEY": "foreign"})


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({"vllm_enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ({"vllm_enforce_eager": True}, ["--enforce-eager"]),
        ({"vllm_tensor_parallel_size": 2}, ["--tensor-parallel-size", "2"]),
        ({"vllm_engine_args": {"cudagraph_capture_sizes": [1, 2]}}, ["--cudagraph-capture-sizes", "1", "2"]),
        ({"vllm_serve_extra_args": "--swap-space=4"}, ["--swap-space=4"]),
        ({"chat_template": "{{ messages }}"}, ["--chat-template", "{{ messages }}"]),
        ({"chat_template": "~/t.jinja"}, ["--chat-template", str(Path.home() / "t.jinja")]),
        ({"lora": {"law": "/l"}}, ["--lora-modules", "law=/l", "--enable-lora", "--max-loras", "1"]),
        ({"vllm_serve_sleep_s": 60}, ["--enable-sleep-mode"]),
        (
            {"vllm_serve_tool_parser": "pythonic"},
            ["--enable-auto-tool-choice", "--tool-call-parser", "pythonic"],
        ),
        ({"vllm_serve_reasoning_parser": "qwen3"}, ["--reasoning-parser", "qwen3"]),
        ({"template": "<tool_call>", "vllm_serve_tool_parser": "none"}, []),
        (
            {"template": "[THINK] [TOOL_CALLS]"},
            ["--enable-auto-tool-choice", "--tool-call-parser", "mistral", "--reasoning-parser", "mistral"],
        ),
    ],
)
def test_each_field_has_its_flag(fields: dict[str, Any], flags: list[str]) -> None:
    assert added(**fields) == flags


@pytest.mark.parametrize("extra", [["--dtype", "half"], ["--dtype=half"]])
def test_extra_arguments_replace_ours(extra: list[str]) -> None:
    argv = line(vllm_serve_extra_args=extra)
    assert [argument for argument in argv if argument.startswith("--dtype")] == extra[:1]
    assert argv[-len(extra) :] == extra


@pytest.mark.parametrize(
    ("fields", "template", "parser"),
    [
        ({}, None, None),
        ({}, "<tool_call>", "hermes"),
        ({"vllm_serve_extra_args": ["--tool-call-parser", "xlam"]}, None, "xlam"),
        ({"vllm_serve_extra_args": ["--tool_call_parser=xlam"]}, "<tool_call>", "xlam"),
    ],
)
def test_tool_parser_comes_from_the_extra_arguments_or_the_template(
    fields: dict[str, Any], template: str | None, parser: str | None
) -> None:
    assert tool_call_parser(Options(vllm_model="m", **fields), template) == parser


def test_environment_has_the_variables_of_the_definition_and_disables_usage_statistics() -> None:
    options = Options(vllm_model="m", vllm_serve_env={"A": "1"}, vllm_serve_library_path="/a", vllm_serve_sleep_s=1)
    assert environment(options, SOCKET, {"A": "0", "DO_NOT_TRACK": "0"}) == {
        "A": "1",
        "LD_LIBRARY_PATH": "/a",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "0",
        "PYTHONUNBUFFERED": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_RPC_BASE_PATH": str(Path(SOCKET.host).parent),
    }


def test_the_sockets_of_vllms_processes_are_in_the_folder_that_is_removed_with_the_server() -> None:
    options, port = Options(vllm_model="m"), ListenAddress("127.0.0.1", 8000)
    assert environment(options, ListenAddress("/private/server.sock"), {})["VLLM_RPC_BASE_PATH"] == "/private"
    assert "VLLM_RPC_BASE_PATH" not in environment(options, port, {}), "there is no such folder"
    assert environment(options, SOCKET, {"VLLM_RPC_BASE_PATH": "/mine"})["VLLM_RPC_BASE_PATH"] == "/mine"


# --- parsers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("<tool_call>{…}</tool_call>", "hermes"),
        ("<tool_call><function=name>", "qwen3_coder"),
        ("<|python_tag|>", "llama3_json"),
        ("[TOOL_CALLS]", "mistral"),
        ("<tool_call>name<arg_key>", "glm45"),
    ],
)
def test_tool_parser_is_chosen_by_the_markers_of_the_template(template: str | None, parser: str | None) -> None:
    assert tool_call_parser(MINIMAL, template) == parser


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (None, None),
        ("<think>", "deepseek_r1"),
        ("{% if enable_thinking %}<think>", "qwen3"),
        ("<|channel|>analysis", "openai_gptoss"),
    ],
)
def test_reasoning_parser_is_chosen_by_the_markers_of_the_template(template: str | None, parser: str | None) -> None:
    assert reasoning_parser(MINIMAL, template) == parser


def test_configured_parser_wins_and_none_disables_it() -> None:
    named = Options(vllm_model="m", vllm_serve_tool_parser="xlam", vllm_serve_reasoning_parser="none")
    disabled = Options(vllm_model="m", vllm_serve_tool_parser="none")
    assert tool_call_parser(named, "<tool_call>") == "xlam"
    assert tool_call_parser(disabled, "<tool_call>") is None
    assert reasoning_parser(named, "<think>") is None


@pytest.mark.parametrize(
    ("template", "switches"),
    [
        ("{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}", True),
        ("{% if thinking %}<think>{% endif %}", True),
        ("{{ messages[0].content }}<thinking>", False),
        ("{% generation %}{{ enable_thinking }}{% endgeneration %}", True),
        ("{% generation %}{{ messages }}{% endgeneration %}", False),
        (None, True),
    ],
)
def test_a_model_has_thinking_modes_if_its_template_reads_the_switch(template: str | None, switches: bool) -> None:
    assert switches_thinking(template) is switches
