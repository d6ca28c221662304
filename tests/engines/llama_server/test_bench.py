"""llama-bench: its command line out of a model's settings, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.core.errors import NotFound, Unavailable
from modelyard.engines.llama_server.bench import arguments, bench, program, rates
from modelyard.engines.llama_server.options import Options

SAID = [{"n_prompt": 64, "n_gen": 0, "avg_ts": 700.5}, {"n_prompt": 0, "n_gen": 16, "avg_ts": 42.0}]


def spec(cache: CacheInfo = CacheInfo(512), **options: object) -> EngineSpec:
    return EngineSpec("m", Options(path="m.gguf", **options), {"main": cache})  # type: ignore[arg-type]


def pairs(made: EngineSpec) -> dict[str, str]:
    told = list(arguments(made, Path("m.gguf"), 64, 16))
    return dict(zip(told[::2], told[1::2], strict=True))


def fake_program(folder: Path, body: str, name: str = "llama-bench") -> str:
    for each, text in (("llama-server", "exit 1"), (name, body)):
        (folder / each).write_text(f"#!/bin/sh\n{text}\n")
        (folder / each).chmod(0o755)
    return str(folder / "llama-server")


def test_the_settings_become_its_arguments():
    told = pairs(
        spec(
            CacheInfo(512, type_k="q8_0", type_v="q4_0", n_batch=256, n_ubatch=128, flash_attn=True),
            llama_server_n_threads=3,
            llama_server_n_gpu_layers="all",
        )
    )
    assert told["--threads"] == "3"
    assert (told["--batch-size"], told["--ubatch-size"]) == ("256", "128")
    assert (told["--cache-type-k"], told["--cache-type-v"]) == ("q8_0", "q4_0")
    assert (told["--flash-attn"], told["--n-gpu-layers"]) == ("on", "-1")
    assert (told["--n-prompt"], told["--n-gen"]) == ("64", "16")


def test_what_is_not_set_is_left_to_it():
    assert pairs(spec()).keys().isdisjoint({"--threads", "--batch-size", "--flash-attn", "--n-gpu-layers"})


def test_its_rates_are_read():
    assert rates(json.dumps(SAID).encode()) == (700.5, 42.0)


@pytest.mark.parametrize("said", [b"", b"nonsense", b"[]", b'[{"n_prompt": 1, "avg_ts": 2}]'])
def test_what_it_should_not_say_is_an_error(said):
    with pytest.raises(Unavailable, match="something else"):
        rates(said)


def test_it_is_run_and_heard(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    binary = fake_program(tmp_path, f"echo '{json.dumps(SAID)}'")
    made = EngineSpec("m", Options(path=str(tmp_path / "m.gguf"), llama_server_binary=binary), {"main": CacheInfo(512)})
    assert bench(made, 64, 16) == (700.5, 42.0)


def test_its_failure_is_told_in_its_own_words(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    binary = fake_program(tmp_path, "echo 'no such tensor' >&2; exit 3")
    made = EngineSpec("m", Options(path=str(tmp_path / "m.gguf"), llama_server_binary=binary), {"main": CacheInfo(512)})
    with pytest.raises(Unavailable, match="exit code 3: no such tensor"):
        bench(made, 64, 16)


def test_where_it_is_not_there_nobody_is_asked(tmp_path: Path):
    binary = fake_program(tmp_path, "exit 0", "something-else")
    made = spec(llama_server_binary=binary)
    assert program(made.options) is None
    with pytest.raises(NotFound, match="no llama-bench"):
        bench(made, 64, 16)
