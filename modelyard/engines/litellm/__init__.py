"""Any provider that the LiteLLM library supports. Requests leave this machine, with consent."""

from __future__ import annotations

from typing import Literal

from modelyard.core.engine import AvailableMemory, Engine, EngineSpec, MemoryEstimate
from modelyard.engines.litellm.engine import CAPABILITIES, LiteLlmEngine, verify
from modelyard.engines.litellm.options import LiteLlmOptions as Options

__all__ = [
    "CAPABILITIES",
    "HOLDS_WEIGHTS",
    "LIVE_OVERRIDES",
    "REMOTE",
    "Options",
    "create",
    "estimate",
    "kind",
    "verify",
]

HOLDS_WEIGHTS = False
REMOTE = True
LIVE_OVERRIDES: dict[str, object] = {}


def kind(options: Options) -> Literal["text", "chat"]:
    del options
    return "chat"


def create(spec: EngineSpec) -> Engine:
    """Call it on the event loop that the engine will run on."""
    return LiteLlmEngine(spec)


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    """It loads no weights."""
    del spec, machine
    return MemoryEstimate()
