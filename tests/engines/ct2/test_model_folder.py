"""A CTranslate2 model's folder, and the memory estimate computed from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import modelyard_ct2 as ct2
from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec
from modelyard.core.errors import InvalidRequest, NotFound
from modelyard_ct2.model_folder import find_folder, read_trained_length, read_variables, read_vocabulary
from tests.engines.ct2.helpers import model_folder

SMOLLM2 = {"layers": 30, "width": 576, "vocab": 49152}


def test_vocabulary_is_the_tokenizers() -> None:
    vocabulary = read_vocabulary(model_folder())
    assert (len(vocabulary), vocabulary[2]) == (SMOLLM2["vocab"], "<|im_end|>")


def test_older_conversions_have_one_token_per_line(tmp_path: Path) -> None:
    (tmp_path / "vocabulary.txt").write_text("<s>\nĠa\nb\n", "utf-8")
    assert read_vocabulary(tmp_path) == ["<s>", "Ġa", "b"]


@pytest.mark.parametrize(
    ("file", "text"), [("vocabulary.json", "{}"), ("vocabulary.json", '["a", "a"]'), ("other.json", "[]")]
)
def test_unusable_vocabulary_is_an_error_that_names_the_folder(file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(InvalidRequest, match=str(tmp_path)):
        read_vocabulary(tmp_path)


def test_path_is_the_folder_or_its_weights_file() -> None:
    assert find_folder(str(model_folder())) == find_folder(str(model_folder() / "model.bin")) == model_folder()


def test_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"model\.bin"):
        find_folder(str(tmp_path))


def test_trained_length_comes_from_the_tokenizer_config(tmp_path: Path) -> None:
    assert read_trained_length(model_folder()) == 8192
    assert read_trained_length(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert read_trained_length(tmp_path) is None


def test_variables_are_read_without_their_weights() -> None:
    variables = read_variables(model_folder())
    assert variables["decoder/embeddings/weight"].shape == (SMOLLM2["vocab"], SMOLLM2["width"])
    assert variables["decoder/embeddings/weight"].dtype == "int8"
    stored = sum(variable.bytes for variable in variables.values())
    assert 0 < (model_folder() / "model.bin").stat().st_size - stored < 100_000


@pytest.mark.parametrize("data", [b"", b"\x06\0\0\0", bytes(range(256)), b"\x06\0\0\0\xff\xff" + b"x" * 9])
def test_file_that_is_not_a_model_is_refused_by_name(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(data)
    with pytest.raises(InvalidRequest, match=str(tmp_path)):
        read_variables(tmp_path)


# --- the memory estimate ----------------------------------------------------------------------------------------------


def test_estimate_counts_the_keys_of_every_query_head() -> None:
    options = ct2.Options(path=str(model_folder()), device="cpu")
    memory = ct2.estimate(EngineSpec("m", options, {"main": CacheInfo(1000, 3)}), AvailableMemory(1 << 34))
    assert memory.kv == 2 * 4 * SMOLLM2["layers"] * SMOLLM2["width"] * 3000
    assert memory.device == "cpu"


def test_estimated_weights_follow_the_compute_type() -> None:
    def weights(compute_type: str) -> int:
        options = ct2.Options(path=str(model_folder()), compute_type=compute_type)
        return ct2.estimate(EngineSpec("m", options, {}), AvailableMemory(1 << 34)).weights

    file = (model_folder() / "model.bin").stat().st_size  # int8: it is kept when it is converted
    for compute_type, factor in (("float16", 2), ("float32", 4)):
        assert weights(compute_type) == pytest.approx(factor * weights("int8") + file, rel=0.02)


_MEASURE = """
import asyncio, sys
from pathlib import Path
from modelyard.core.engine import AvailableMemory
import modelyard_ct2 as ct2
from tests.engines.ct2.helpers import CacheInfo, EngineSpec, GREEDY, Prompt, TokenRun
from tests.engines.reading import read

def resident(name):
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").open() if line.startswith(name))

async def main():
    window, parallel = 512, 2
    spec = EngineSpec("m", ct2.Options(path=sys.argv[1], device="cpu"), {"main": CacheInfo(window, parallel)})
    before = resident("VmRSS")
    engine = ct2.create(spec)
    await engine.open(lambda *_: None)
    prompts = [
        Prompt(parts=(TokenRun([100 + n] * (window - 8)),), sampling=GREEDY, max_tokens=4, cache="main")
        for n in range(parallel)
    ]
    await asyncio.gather(*(read(engine.generate(prompt)) for prompt in prompts))
    print(resident("VmHWM") - before, ct2.estimate(spec, AvailableMemory(1 << 34)).total)
    await engine.close()

asyncio.run(main())
"""


def test_the_estimate_is_near_what_two_full_conversations_take() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(model_folder())], capture_output=True, text=True, check=True
    )
    measured, estimated = map(int, run.stdout.split())
    assert estimated == pytest.approx(
        measured, rel=0.2
    )  # 0.91 to 1.0 from 512 to 4096 tokens, one to four conversations


def test_estimate_uses_a_gpu_if_there_is_one_with_keys_of_half_the_size() -> None:
    options = ct2.Options(path=str(model_folder()), device="auto")
    spec = EngineSpec("m", options, {"main": CacheInfo(1000)})
    on_gpu, on_cpu = (ct2.estimate(spec, AvailableMemory(1 << 34, gpus)) for gpus in ({"gpu": 1 << 34}, {}))
    assert (on_gpu.device, on_cpu.device) == ("gpu", "cpu")
    assert 2 * on_gpu.kv == on_cpu.kv
