"""The command line and environment of a `vllm serve`, worked out of a model's fields. Pure.

Everything that vLLM's engine takes goes by the same name on its command line. What a definition's extra arguments name
is not said twice: they go before our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from modelyard.core.engine import CacheInfo
from modelyard.engines.managed.listening import Listening
from modelyard.engines.vllm.arguments import engine_arguments
from modelyard.engines.vllm_serve.options import Options, flag_of
from modelyard.engines.vllm_serve.parsers import reasoning_parser, tool_parser

Flag = tuple[str, list[str]]
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}


class Served(msgspec.Struct, frozen=True):
    """`name` is what requests call the model; `model` where it lies; `template` the text of its own chat template."""

    name: str
    model: str
    template: str | None = None


def command(binary: str, served: Served, options: Options, caches: Mapping[str, CacheInfo], at: Listening) -> list[str]:
    arguments = engine_arguments(options, caches, served.model)
    model = arguments.pop("model")
    theirs = {flag_of(argument) for argument in options.vllm_serve_extra_args if argument.startswith("--")}
    flags = [*_listening(at), *_frontend(options, served), *map(_flag, arguments.items())]
    ours = [text for flag, values in flags if flag not in theirs for text in (flag, *values)]
    return [binary, "serve", model, *ours, *options.vllm_serve_extra_args]


def _listening(at: Listening) -> Iterator[Flag]:
    if at.port is None:
        yield "--uds", [at.host]
    else:
        yield from (("--host", [at.host]), ("--port", [str(at.port)]))


def _frontend(options: Options, served: Served) -> Iterator[Flag]:
    """What vLLM's HTTP side has to know, beside its engine."""
    yield "--served-model-name", [served.name]
    yield "--enable-prompt-tokens-details", []  # else its usage does not tell what was cached
    yield "--disable-uvicorn-access-log", []  # the log's last lines are for what went wrong
    if options.chat_template is not None:
        yield "--chat-template", [_template(options.chat_template)]
    if parser := tools(options, served.template):
        yield from (("--enable-auto-tool-choice", []), ("--tool-call-parser", [parser]))
    if parser := reasoning_parser(options.vllm_serve_reasoning_parser, _rendered_by(options, served.template)):
        yield "--reasoning-parser", [parser]
    if options.lora:
        yield "--lora-modules", [f"{name}={Path(path).expanduser()}" for name, path in options.lora.items()]
    if options.vllm_serve_sleep_s:
        yield "--enable-sleep-mode", []


def tools(options: Options, template: str | None) -> str | None:
    """The parser of tool calls that the server is told, by whoever tells it; None: it offers no tools."""
    for at, argument in enumerate(extra := options.vllm_serve_extra_args):
        if flag_of(argument) == "--tool-call-parser":
            return argument.partition("=")[2] or next(iter(extra[at + 1 :]), None)
    return tool_parser(options.vllm_serve_tool_parser, _rendered_by(options, template))


def _rendered_by(options: Options, template: str | None) -> str | None:
    return options.chat_template if options.chat_template and _is_text(options.chat_template) else template


def _template(told: str) -> str:
    return told if _is_text(told) else str(Path(told).expanduser())


def _is_text(told: str) -> bool:
    """A text or a file, told apart as everywhere: a template has braces."""
    return "{" in told or "\n" in told


def _flag(argument: tuple[str, Any]) -> Flag:
    name, value = argument
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{flag}" if value else f"--no-{flag}"), []
    if isinstance(value, dict):
        return f"--{flag}", [msgspec.json.encode(value).decode()]
    if isinstance(value, list | tuple):
        return f"--{flag}", [str(each) for each in value]
    return f"--{flag}", [str(value)]


def environment(options: Options, at: Listening, inherited: Mapping[str, str]) -> dict[str, str]:
    """The key travels here and not on the command line, where every user of the machine could read it."""
    env = {**_QUIET, **inherited, **options.vllm_serve_env}
    if at.key:
        env["VLLM_API_KEY"] = at.key
    else:
        env.pop("VLLM_API_KEY", None)
    if options.vllm_serve_sleep_s:
        env["VLLM_SERVER_DEV_MODE"] = "1"
    if options.vllm_serve_library_path:
        before = [str(Path(folder).expanduser()) for folder in options.vllm_serve_library_path]
        env["LD_LIBRARY_PATH"] = ":".join([*before, *filter(None, [env.get("LD_LIBRARY_PATH")])])
    return env
