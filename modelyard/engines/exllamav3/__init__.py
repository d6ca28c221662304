"""ExLlamaV3 in process: EXL3 weights on NVIDIA GPUs, jobs that join and leave a running batch, prompts cached by pages.

What it cannot do, and what follows from it:

- Prompts are read in chunks of 256 tokens at least, and the last chunk says the first token in the same go: a short
  prompt cannot be broken off while it is read.
- An adapter (LoRA) would be worn by all jobs at once, and the paths that decode do not look at it: none is taken.
- Typical sampling, Mirostat and beam search do not exist there; they are accepted and not honoured.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from modelyard.core.engine import Engine, EngineSpec
from modelyard.engines.exllamav3 import model_folder
from modelyard.engines.exllamav3.arguments import CAPABILITIES
from modelyard.engines.exllamav3.estimate import estimate
from modelyard.engines.exllamav3.options import LIVE_OVERRIDES
from modelyard.engines.exllamav3.options import ExllamaOptions as Options
from modelyard.plugins import MissingLibrary

__all__ = [
    "CAPABILITIES",
    "HOLDS_WEIGHTS",
    "LIVE_OVERRIDES",
    "OWN_PROCESS",
    "Options",
    "chat_template",
    "create",
    "estimate",
    "kind",
    "tokenizer_path",
    "verify",
]

HOLDS_WEIGHTS = True
# A step on a GPU is over in a millisecond: a busy gateway in the same interpreter would be felt in every one.
OWN_PROCESS = True

_NEEDED = ("torch", "exllamav3", "llguidance")


def kind(options: Options) -> Literal["text", "chat"]:
    del options
    return "text"


def verify() -> None:
    """Whether it is installed. Importing it compiles its kernels for minutes where nobody has, so that waits."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise MissingLibrary(
            f"exllamav3 needs the Python package {missing[0]!r}: install a build of torch for your CUDA version, then "
            "pip install 'modelyard[exllamav3]'"
        )


def create(spec: EngineSpec) -> Engine:
    """To be called on the loop that its answers are read on."""
    verify()
    from modelyard.engines.exllamav3.engine import ExllamaEngine

    return ExllamaEngine(spec)


def tokenizer_path(options: Options) -> Path:
    """The folder itself: a quantized model keeps its tokenizer beside the weights."""
    return model_folder.find_folder(options.path)


def chat_template(options: Options) -> str | None:
    """None: it lies in the folder, where everybody looks."""
    del options
    return None
