"""The `vllm serve` program: where it is found, how it is started for a model, and whether it is ready."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any, cast

import msgspec

from modelyard.core.engine import EngineSpec
from modelyard.core.errors import ModelyardError, NotFound
from modelyard.engines.managed.listening import listening, private
from modelyard.engines.managed.server import Program, Server
from modelyard.engines.vllm import folder
from modelyard.engines.vllm_serve.command import Served, command, environment
from modelyard.engines.vllm_serve.options import Options
from modelyard.engines.vllm_serve.reason import reason
from modelyard.library import vllm_env

log = logging.getLogger(__name__)


def program(spec: EngineSpec) -> Program:
    options = cast(Options, spec.options)
    if len(spec.caches) > 1:
        log.warning("%s: vLLM has one KV cache for the caches %s", spec.model, ", ".join(spec.caches))
    binary, model = find_binary(options), served(spec)
    home = private("modelyard-vllm-") if options.is_private else None
    at = listening(home, options.vllm_serve_host, options.vllm_serve_port, options.vllm_serve_api_key)
    return Program(
        name="vllm serve",
        loads=model.model,
        argv=command(binary, model, folder.placed(options), spec.caches, at),
        env=environment(options, at, os.environ),
        place=at.place(f"the vllm serve of {spec.model!r}", options.vllm_serve_timeout_s),
        reason=reason,
        folder=home,
    )


def served(spec: EngineSpec) -> Served:
    options = cast(Options, spec.options)
    return Served(spec.model, folder.written(options), _template(folder.find(options.model_name)))


def _template(place: Path | None) -> str | None:
    """Of the model's folder: a file of its own, or a field of the tokenizer's settings."""
    if place is None:
        return None
    try:
        if (file := place / "chat_template.jinja").is_file():
            return file.read_text("utf-8")
        told: Any = msgspec.json.decode((place / "tokenizer_config.json").read_bytes())
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError):
        return None
    template = told.get("chat_template") if isinstance(told, dict) else None
    return template if isinstance(template, str) else None


async def lists_models(server: Server) -> bool:
    try:
        status, _ = await server.client.ask("GET", "/v1/models")
    except ModelyardError:
        return False  # it does not listen yet
    return status == 200


async def answers(server: Server, body: bytes) -> bool:
    """Whether it lives through a request. That it refuses one is an answer, too."""
    try:
        status, _ = await server.client.ask("POST", "/v1/chat/completions", body)
    except ModelyardError:
        return False
    return status < 500


def find_binary(options: Options) -> str:
    if options.vllm_serve_binary is not None:
        named = Path(options.vllm_serve_binary).expanduser()
        if found := shutil.which(str(named)):
            return found
        raise NotFound(f"vllm_serve_binary: there is no program {str(named)!r}", code="program_missing")
    if found := shutil.which("vllm") or shutil.which(str(vllm_env.program())):
        return found
    raise NotFound(
        "there is no vllm on the PATH: name yours in vllm_serve_binary, or build one that runs without a GPU with "
        "make vllm-env",
        code="program_missing",
    )
