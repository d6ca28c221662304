"""Installs the public programs that check a server from outside into the cache folder: `python -m setup.compliance`.

They get one virtual environment of their own, without torch. `make test-compliance` runs them: lm-eval measures a model
here and in llama-server, and openapi-spec-validator reads the description of the API. lm-eval needs the tokenizer of
the tests' model as a Hugging Face folder, which is converted, too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from modelyard.core.errors import ModelyardError
from modelyard.library.cache_dir import cache_dir
from modelyard.library.convert import convert
from setup.installer import install_once

PACKAGES = ("lm_eval[api]==0.4.13", "transformers==5.22.2", "openapi-spec-validator==0.9.0")


def main() -> int:
    try:
        install_once(folder(), "the compliance tests", commands, dict(os.environ), program("lm_eval"))
        print(f"lm-eval: {program('lm_eval')}\nits tokenizer: {tokenizer()}")
    except (ModelyardError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def folder() -> Path:
    digest = hashlib.sha256("\n".join(PACKAGES).encode()).hexdigest()[:12]
    return cache_dir(os.environ) / f"compliance-{digest}"


def program(name: str) -> Path:
    return folder() / "bin" / name


def tokenizer() -> Path:
    return Path(convert("smollm2", "hf").path)


def commands() -> Iterator[list[str]]:
    python, uv = str(folder() / "bin" / "python"), shutil.which("uv")
    yield [sys.executable, "-m", "venv", str(folder())]
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    yield [*([uv, "pip", "install", "--python", python] if uv else pip), *PACKAGES]


if __name__ == "__main__":
    sys.exit(main())
