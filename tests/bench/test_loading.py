"""The loading benchmark runs both sides of every engine."""

from __future__ import annotations

from bench.loading import measure
from tests.engines.ct2.helpers import tiny_folder
from tests.engines.llama_cpp.short_model import short_model_file


def test_every_engine_is_loaded_through_our_server_and_directly() -> None:
    found = measure(1, short_model_file(), tiny_folder(), warmup=0)
    assert [one.name.partition(":")[0] for one in found] == ["llama_cpp", "ct2", "llama_server"]
    assert all(len(one.ours) == len(one.theirs) == 1 for one in found)
    assert all(seconds > 0 for one in found for seconds in (*one.ours, *one.theirs))
