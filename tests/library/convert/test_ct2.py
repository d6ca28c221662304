"""A converted model computes what llama.cpp computes from the file it was made of."""

from __future__ import annotations

from pathlib import Path

import ctranslate2
import numpy as np
import pytest

from modelyard.core.engine import AvailableMemory, EngineSpec
from modelyard.engines import ct2
from modelyard.library.convert import convert
from tests.engines.llama_cpp import reference
from tests.library.convert import tiny

IDS = [1, 20, 30, 40, 77, 140, 3, 9, 200, 31, 8]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_same_log_probabilities_as_llama_cpp(architecture: str, tmp_path: Path):
    file = tiny.write_model(tmp_path / "tiny.gguf", architecture)
    folder = convert(str(file), "ct2", quantization="float32", out=tmp_path / "out").path
    generator = ctranslate2.Generator(folder, intra_threads=1, compute_type="float32")
    view = generator.forward_batch([IDS], return_log_probs=True)
    got = np.array(view)[0, -1]
    del generator, view
    (expected,) = reference.logprobs(file, IDS, [[len(IDS)]])
    assert np.abs(got - expected).max() < 0.1  # llama.cpp's KV has sixteen bits
    assert np.ptp(expected) > 10, "a flat distribution would show nothing"


@pytest.mark.parametrize(("quantization", "at_most"), [("int8", 0.3), ("float16", 0.6), ("float32", 1.1)])
def test_quantization_decides_the_size(quantization: str, at_most: float, tmp_path: Path):
    file = tiny.write_model(tmp_path / "tiny.gguf")
    folder = Path(convert(str(file), "ct2", quantization=quantization, out=tmp_path / "out").path)
    numbers = sum(data.size for data in tiny._weights("llama").values())
    assert (folder / "model.bin").stat().st_size < at_most * 4 * numbers + 8192


def test_an_engine_can_tell_what_it_would_take(tmp_path: Path):
    file = tiny.write_model(tmp_path / "tiny.gguf")
    folder = convert(str(file), "ct2", out=tmp_path / "out").path
    memory = ct2.estimate(EngineSpec("tiny", ct2.Options(path=folder), {}), AvailableMemory(1 << 30))
    assert memory.weights > 0
    assert memory.kv == 0
