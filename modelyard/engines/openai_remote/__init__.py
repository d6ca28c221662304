"""Another server with a Chat Completions, Responses or Anthropic Messages API. Requests leave this machine, with
consent."""

from __future__ import annotations

from typing import Literal

from modelyard.core.engine import AvailableMemory, Engine, EngineSpec, MemoryEstimate
from modelyard.engines.openai_remote.engine import CAPABILITIES, OpenAiRemoteEngine
from modelyard.engines.openai_remote.options import OpenAiRemoteOptions as Options

__all__ = ["CAPABILITIES", "HOLDS_WEIGHTS", "LIVE_OVERRIDES", "REMOTE", "Options", "create", "estimate", "kind"]

HOLDS_WEIGHTS = False
REMOTE = True
LIVE_OVERRIDES: dict[str, object] = {}


def kind(options: Options) -> Literal["text", "chat"]:
    del options
    return "chat"


def create(spec: EngineSpec) -> Engine:
    """Call it on the event loop that the engine will run on."""
    return OpenAiRemoteEngine(spec)


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    """It loads nothing."""
    del spec, machine
    return MemoryEstimate()
