"""Sampling in llama.cpp's graph and on the CPU, measured on a CPU."""

from __future__ import annotations

import pytest

from bench.decode_step import submit_ahead
from bench.gpu import graph_rates
from modelyard.engines.llama_cpp import loading
from modelyard.engines.llama_cpp.graph_sampler import GraphSampler
from tests.engines.llama_cpp.exact_models import exact_model


async def test_the_graph_samples_every_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    plain = GraphSampler.sample
    monkeypatch.setattr(GraphSampler, "sample", lambda *given: drawn.append(1) or plain(*given))
    monkeypatch.setattr(loading, "samples_in_graph", lambda *_: True)
    with submit_ahead():
        found = await graph_rates(exact_model(), streams=4, rounds=2, tokens=8, requests=1)
    assert {name: [len(rates["cpu"]), len(rates["graph"])] for name, rates in found.items()} == {
        "long": [2, 2],
        "short": [2, 2],
    }
    assert len(drawn) >= 2 * 4 * (8 + 48)


async def test_a_model_that_the_cpu_samples_is_refused() -> None:
    with pytest.raises(SystemExit, match="NVIDIA GPU"):
        await graph_rates(exact_model(), streams=1, rounds=1, tokens=8)
