"""The bench of loading runs both sides of every engine, and counts only what was counted."""

from __future__ import annotations

from pathlib import Path

from bench.loads import measure
from modelyard.library import default_model
from modelyard.library.convert import convert


def test_every_engine_is_loaded_by_us_and_by_hand() -> None:
    found = measure(1, default_model.fetch(), Path(convert("smollm2", "ct2").path))
    assert [one.what.partition(":")[0] for one in found] == ["llama_cpp", "ct2", "llama_server"]
    assert all(len(one.ours) == len(one.theirs) == 1 for one in found)
    assert all(seconds > 0 for one in found for seconds in (*one.ours, *one.theirs))
