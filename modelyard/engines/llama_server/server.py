"""The llama-server program: where it is found, how it is started for a model, and whether it has loaded it."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import cast

from modelyard.core.engine import EngineSpec, OnProgress
from modelyard.core.errors import ModelyardError, NotFound
from modelyard.engines.llama_server.command import command, environment
from modelyard.engines.llama_server.options import Options
from modelyard.engines.llama_server.reason import reason
from modelyard.engines.managed.listening import listening, private
from modelyard.engines.managed.server import Program, Server
from modelyard.library import llama_server as fetched
from modelyard.library.model_files import locate_model_file

log = logging.getLogger(__name__)


def program(spec: EngineSpec) -> Program:
    options, caches = cast(Options, spec.options), spec.caches
    if len(caches) > 1:
        log.warning("%s: llama-server has one set of slots for the caches %s", spec.model, ", ".join(caches))
    binary, file = find_binary(options), locate_model_file(options.path)
    folder = private("modelyard-llama-") if _is_private(options) else None
    at = listening(folder, options.llama_server_host, options.llama_server_port)
    return Program(
        name="llama-server",
        loads=str(file),
        argv=command(binary, file, options, caches, at),
        env=environment(options, at, os.environ),
        place=at.place(f"the llama-server of {spec.model!r}", options.llama_server_timeout_s),
        reason=reason,
        folder=folder,
    )


async def is_healthy(server: Server, progress: OnProgress) -> bool:
    try:
        status, _ = await server.client.ask("GET", "/health")
    except ModelyardError:
        return False  # it does not listen yet
    if status == 503:
        progress(0.2, "loading the weights")
    return status == 200


def find_binary(options: Options) -> str:
    if options.llama_server_binary is not None:
        named = Path(options.llama_server_binary).expanduser()
        if found := shutil.which(str(named)):
            return found
        raise NotFound(f"llama_server_binary: there is no program {str(named)!r}", code="program_missing")
    if found := shutil.which("llama-server") or shutil.which(str(fetched.binary_path())):
        return found
    raise NotFound(
        "there is no llama-server on the PATH: name yours in llama_server_binary, or fetch one with "
        "python setup/llama_server.py",
        code="program_missing",
    )


def _is_private(options: Options) -> bool:
    return options.llama_server_host is None and options.llama_server_port is None
