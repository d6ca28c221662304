"""The quality loss of a quantized KV cache, measured by the library on the same file."""

from __future__ import annotations

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.engines.llama_server import Options
from modelyard.engines.llama_server.loss import loss
from tests.engines.llama_cpp.helpers import model_file, vocabulary


def spec(*types: str) -> EngineSpec:
    options = Options(path=str(model_file()), llama_server_n_threads=1)
    return EngineSpec("m", options, {"main": CacheInfo(512, 2, *types), "fast": CacheInfo(256)})


def test_quantized_cache_diverges_from_the_reference() -> None:
    ids = vocabulary().encode_plain("Eleven goats crossed the river before the bridge was built, and none after.")
    same, rounded = loss(spec(), spec(), ids), loss(spec("q8_0", "q8_0"), spec(), ids)
    assert same.divergence == 0
    assert rounded.divergence is not None
    assert rounded.divergence > 0
    assert rounded.reference == same.perplexity
