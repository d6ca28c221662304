"""What llama.cpp itself would fit to this machine: asked of llama-fit-params, where it lies beside llama-server."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from pathlib import Path

from modelyard.core.errors import NotFound
from modelyard.engines.llama_server.options import Options
from modelyard.engines.llama_server.server import find_binary

_LONGEST_S = 120.0


def fitted_layers(options: Options, model: Path) -> str | None:
    """How many layers it would put on the GPU: a number, -1 for all. None where nobody can be asked."""
    try:
        program = Path(find_binary(options)).with_name("llama-fit-params")
    except NotFound:
        return None
    if not program.is_file():
        return None
    try:
        done = subprocess.run([str(program), "-m", str(model)], capture_output=True, check=False, timeout=_LONGEST_S)  # noqa: S603
    except subprocess.TimeoutExpired:
        return None
    return layers(done.stdout.decode("utf-8", "replace")) if done.returncode == 0 else None


def layers(said: str) -> str | None:
    """Out of the arguments that it prints."""
    return next((value for flag, value in pairwise(said.split()) if flag in ("-ngl", "--n-gpu-layers")), None)
