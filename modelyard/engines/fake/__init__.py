"""The fake engine: scripted answers, delays, failures and death, for demos, load tests and the tests of clients."""

from __future__ import annotations

from typing import Literal

from modelyard.core.engine import AvailableMemory, Engine, EngineSpec, MemoryEstimate
from modelyard.engines.fake.base import CAPABILITIES
from modelyard.engines.fake.chat import FakeChatEngine
from modelyard.engines.fake.options import LIVE_OVERRIDES, Options, chat_template, tokenizer_path
from modelyard.engines.fake.text import FakeTextEngine

__all__ = [
    "CAPABILITIES",
    "HOLDS_WEIGHTS",
    "KIND",
    "LIVE_OVERRIDES",
    "PROMPT_FORMAT",
    "Options",
    "chat_template",
    "create",
    "estimate",
    "kind",
    "tokenizer_path",
]

HOLDS_WEIGHTS = False  # as many processes as you like may open it
PROMPT_FORMAT = "generic"

KIND: Literal["text", "chat"] = "text"  # the default; `kind` knows what a model's options say


def kind(options: Options) -> Literal["text", "chat"]:
    return options.kind


def create(spec: EngineSpec) -> Engine:
    """To be called on the loop that the engine will run on."""
    return FakeChatEngine(spec) if spec.options.kind == "chat" else FakeTextEngine(spec)


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    """Nothing is loaded; a token that is remembered costs one list slot."""
    del machine
    return MemoryEstimate(kv=8 * sum(cache.window * cache.parallel for cache in spec.caches.values()))
