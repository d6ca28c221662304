"""The fake engine plays scripted answers, delays and failures: for demos, load tests and tests of clients."""

from __future__ import annotations

from modelyard.core.engine import AvailableMemory, Engine, EnginePlugin, EngineSpec, MemoryEstimate
from modelyard_fake.engine import CAPABILITIES as CAPABILITIES
from modelyard_fake.engine import FakeChatEngine, FakeTextEngine
from modelyard_fake.script import LIVE_OVERRIDES as LIVE_OVERRIDES
from modelyard_fake.script import FakeOptions
from modelyard_fake.script import tokenizer_path as tokenizer_path

Options = FakeOptions


def create(spec: EngineSpec) -> Engine:
    """Call it on the event loop that the engine will run on."""
    return FakeChatEngine(spec) if spec.options.kind == "chat" else FakeTextEngine(spec)


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    """No weights; a cached token costs one list slot."""
    del machine
    return MemoryEstimate(kv=8 * sum(cache.window * cache.parallel for cache in spec.caches.values()))


ENGINE = EnginePlugin(
    Options=Options,
    create=create,
    capabilities=CAPABILITIES,
    holds_weights=False,
    tokenizer_path=tokenizer_path,
    prompt_format="generic",
    live_overrides=LIVE_OVERRIDES,
    estimate=estimate,
    tuning=__name__,
)
