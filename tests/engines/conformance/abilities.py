"""What an engine says of itself, held against what its module declares, which is what the documentation shows."""

from __future__ import annotations

from modelyard import plugins
from modelyard.core.engine import Capabilities, EngineInfo

_SWITCHES = ("multi_turn", "tools", "structured", "streaming", "logprobs", "lora", "embeddings")


def assert_declared(info: EngineInfo) -> None:
    can, declared = info.capabilities, plugins.load("engines", info.backend).CAPABILITIES
    assert isinstance(declared, Capabilities)
    assert [name for name in _SWITCHES if getattr(can, name) and not getattr(declared, name)] == []
    assert set(can.modalities) <= set(declared.modalities)
    assert set(can.thinking_modes) <= set(declared.thinking_modes)
    assert set(declared.ignored) <= set(can.ignored)
