"""The loading benchmark runs both sides of every engine."""

from __future__ import annotations

from pathlib import Path

from bench.loading import measure
from modelyard.library import default_model
from modelyard.library.convert import convert


def test_every_engine_is_loaded_through_our_server_and_directly() -> None:
    found = measure(1, default_model.fetch(), Path(convert("smollm2", "ct2").path), warmup=0)
    assert [one.name.partition(":")[0] for one in found] == ["llama_cpp", "ct2", "llama_server"]
    assert all(len(one.ours) == len(one.theirs) == 1 for one in found)
    assert all(seconds > 0 for one in found for seconds in (*one.ours, *one.theirs))
