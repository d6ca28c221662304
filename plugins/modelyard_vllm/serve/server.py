"""The `vllm serve` program: its executable, command line and environment.

Every argument of vLLM's engine has the same name on its command line. A flag in the extra arguments of a definition
replaces ours.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jinja2.meta
import msgspec

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.core.errors import ModelyardError
from modelyard.engines.hf_folder import read_template
from modelyard.engines.managed import ListenAddress, ManagedServer, ServerCommand, child_environment, find_program
from modelyard_vllm import env as vllm_env
from modelyard_vllm import model_folder
from modelyard_vllm.async_llm import SOCKET_FOLDER
from modelyard_vllm.errors import failure_reason
from modelyard_vllm.options import engine_arguments
from modelyard_vllm.serve.options import VllmServeOptions, flag_name

log = logging.getLogger(__name__)

Flag = tuple[str, list[str]]
_DEFAULT_ENV = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}


def server_command(spec: EngineSpec) -> ServerCommand:
    options = cast(VllmServeOptions, spec.options)
    if len(spec.caches) > 1:
        log.warning("%s: vLLM has one KV cache for the caches %s", spec.model, ", ".join(spec.caches))
    binary, model = find_binary(options.vllm_serve_binary), model_folder.resolve_model(options)
    private = tempfile.TemporaryDirectory(prefix="modelyard-vllm-") if options.is_private else None
    address = ListenAddress.choose(
        private, options.vllm_serve_host, options.vllm_serve_port, options.vllm_serve_api_key
    )
    served = ServedModel(spec.model, model, model_template(options))
    return ServerCommand(
        name="vllm serve",
        model=model,
        argv=command_line(binary, served, model_folder.resolve_companions(options), spec.caches, address),
        env=environment(options, address, os.environ),
        address=address.upstream(f"the vllm serve of {spec.model!r}", options.vllm_serve_timeout_s),
        failure_reason=failure_reason,
        folder=private,
    )


def find_binary(configured: str | None = None) -> str:
    return find_program(
        "vllm_serve_binary",
        configured,
        ("vllm", vllm_env.program()),
        "there is no vllm on the PATH: set vllm_serve_binary, or build one that runs without a GPU with make vllm-env",
    )


def interpreter_of(program: str) -> str:
    """Of the environment that has this program."""
    path = Path(program).resolve()
    if (beside := path.with_name("python")).exists():
        return str(beside)
    with path.open("rb") as file:
        first = file.readline(512).decode("utf-8", "replace").strip()
    return first[2:].split()[0] if first.startswith("#!") and first[2:].split() else sys.executable


async def lists_models(server: ManagedServer) -> bool:
    try:
        status, _ = await server.upstream.request_json("GET", "/v1/models")
    except ModelyardError:
        return False  # it does not listen yet
    return status == 200


# --- command line -----------------------------------------------------------------------------------------------------


class ServedModel(msgspec.Struct, frozen=True):
    """`name` is for requests; `path` is a folder or a hub name; `template` is the text of its chat template."""

    name: str
    path: str
    template: str | None = None


def command_line(
    binary: str, model: ServedModel, options: VllmServeOptions, caches: Mapping[str, CacheInfo], address: ListenAddress
) -> list[str]:
    arguments = engine_arguments(options, caches, model.path)
    path = arguments.pop("model")
    replaced = {flag_name(argument) for argument in options.vllm_serve_extra_args if argument.startswith("--")}
    flags = [*_http_flags(options, model, address), *map(_engine_flag, arguments.items())]
    ours = [text for flag, values in flags if flag not in replaced for text in (flag, *values)]
    return [binary, "serve", path, *ours, *options.vllm_serve_extra_args]


def _http_flags(options: VllmServeOptions, model: ServedModel, address: ListenAddress) -> Iterator[Flag]:
    if address.port is None:
        yield "--uds", [address.host]
    else:
        yield from (("--host", [address.host]), ("--port", [str(address.port)]))
    yield "--served-model-name", [model.name]
    yield "--enable-prompt-tokens-details", []  # else usage has no cached tokens
    yield "--disable-uvicorn-access-log", []  # keeps the log for errors
    if options.chat_template is not None:
        is_text = _is_template_text(options.chat_template)
        yield "--chat-template", [options.chat_template if is_text else str(Path(options.chat_template).expanduser())]
    if parser := tool_call_parser(options, model.template):
        yield from (("--enable-auto-tool-choice", []), ("--tool-call-parser", [parser]))
    if parser := reasoning_parser(options, model.template):
        yield "--reasoning-parser", [parser]
    if options.lora:
        yield "--lora-modules", [f"{name}={Path(path).expanduser()}" for name, path in options.lora.items()]
    if options.vllm_serve_sleep_s:
        yield "--enable-sleep-mode", []


def _engine_flag(argument: tuple[str, Any]) -> Flag:
    name, value = argument
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{flag}" if value else f"--no-{flag}"), []
    if isinstance(value, dict):
        return f"--{flag}", [msgspec.json.encode(value).decode()]
    return f"--{flag}", [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


def environment(options: VllmServeOptions, address: ListenAddress, inherited: Mapping[str, str]) -> dict[str, str]:
    key = ("VLLM_API_KEY", address.key)
    own, library_path = options.vllm_serve_env, options.vllm_serve_library_path
    # The sockets of vLLM's processes, which it leaves behind, are removed with the server's.
    sockets = {SOCKET_FOLDER: str(Path(address.host).parent)} if address.port is None else {}
    env = child_environment({**_DEFAULT_ENV, **sockets, **inherited}, own, library_path, key)
    return env | {"VLLM_SERVER_DEV_MODE": "1"} if options.vllm_serve_sleep_s else env


# --- parsers ----------------------------------------------------------------------------------------------------------

NO_PARSER = "none"

# (mark in a chat template, vLLM's parser); the first match wins, so a mark that contains another one comes before it
_TOOL_PARSERS = (
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|tool_call>", "gemma4"),
    ("<|python_tag|>", "llama3_json"),
    ("[TOOL_CALLS]", "mistral"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|channel|>", "openai"),
)
_REASONING_PARSERS = (
    ("<|channel|>", "openai_gptoss"),
    ("<|channel>", "gemma4"),
    ("[THINK]", "mistral"),
    ("<arg_key>", "glm45"),
    ("enable_thinking", "qwen3"),
    ("<think>", "deepseek_r1"),
)


def tool_call_parser(options: VllmServeOptions, template: str | None) -> str | None:
    """vLLM's parser of tool calls: from the extra arguments, the options or the template; None: no tools."""
    for at, argument in enumerate(extra := options.vllm_serve_extra_args):
        if flag_name(argument) == "--tool-call-parser":
            return argument.partition("=")[2] or next(iter(extra[at + 1 :]), None)
    return _choose_parser(options.vllm_serve_tool_parser, _TOOL_PARSERS, options, template)


def reasoning_parser(options: VllmServeOptions, template: str | None) -> str | None:
    return _choose_parser(options.vllm_serve_reasoning_parser, _REASONING_PARSERS, options, template)


def _choose_parser(
    configured: str | None, parsers: tuple[tuple[str, str], ...], options: VllmServeOptions, template: str | None
) -> str | None:
    if configured is not None:
        return None if configured == NO_PARSER else configured
    if options.chat_template and _is_template_text(options.chat_template):
        template = options.chat_template
    return next((parser for mark, parser in parsers if mark in (template or "")), None)


def _is_template_text(value: str) -> bool:
    """Tells a template from the path of a template: it has braces."""
    return "{" in value or "\n" in value


def switches_thinking(template: str | None) -> bool:
    """Whether the template reads the switch that a request's thinking mode becomes. Unknown without a template: vLLM
    may find one."""
    if template is None:
        return True
    try:
        variables = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(template))  # noqa: S701 - not rendered
    except jinja2.TemplateError:  # a tag of an extension
        return "enable_thinking" in template
    return not variables.isdisjoint(("enable_thinking", "thinking"))


def model_template(options: VllmServeOptions) -> str | None:
    """The chat template in the folder of the model."""
    path = model_folder.find_folder(options.model_name)
    return None if path is None else read_template(path)
