"""CTranslate2 in process: int8 on CPUs and GPUs, beam search, streams in micro-batches.

What it cannot do, and what follows from it:

- No KV outlives a job: every prompt is read in full, in one go. A job that is cancelled meanwhile ends after that.
- Jobs share a batch when they start together, with the same sampling and prompts of nearly the same length. Nobody
  joins a running batch: another one begins beside it (`inter_threads`).
- A beam search says nothing before its end and cannot be stopped.
- Nothing can reach into the logits: no constrained output, no seed of one's own, no logit bias.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from modelyard.core.engine import Engine, EngineSpec
from modelyard.engines.ct2 import model_folder
from modelyard.engines.ct2.estimate import estimate
from modelyard.engines.ct2.options import CAPABILITIES, LIVE_OVERRIDES
from modelyard.engines.ct2.options import Ct2Options as Options
from modelyard.plugins import MissingLibrary

__all__ = [
    "CAPABILITIES",
    "HOLDS_WEIGHTS",
    "LIVE_OVERRIDES",
    "Options",
    "chat_template",
    "create",
    "estimate",
    "kind",
    "tokenizer_path",
    "verify",
]

HOLDS_WEIGHTS = True


def kind(options: Options) -> Literal["text", "chat"]:
    del options
    return "text"


def verify() -> None:
    if find_spec("ctranslate2") is None:
        raise MissingLibrary("ct2 needs the Python package 'ctranslate2': install it with pip install 'modelyard[ct2]'")


def create(spec: EngineSpec) -> Engine:
    """To be called on the loop that its answers are read on."""
    verify()
    from modelyard.engines.ct2.engine import Ct2Engine

    return Ct2Engine(spec)


def tokenizer_path(options: Options) -> Path:
    """The folder itself: a conversion puts the tokenizer beside the weights."""
    return model_folder.find_folder(options.path)


def chat_template(options: Options) -> str | None:
    """None: it lies in the folder, where everybody looks."""
    del options
    return None
