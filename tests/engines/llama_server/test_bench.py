"""llama-bench: its command line and its output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.core.errors import NotFound, Unavailable
from modelyard.engines.llama_server import Options
from modelyard.engines.llama_server.bench import arguments, bench, parse_rates, program

OUTPUT = [{"n_prompt": 64, "n_gen": 0, "avg_ts": 700.5}, {"n_prompt": 0, "n_gen": 16, "avg_ts": 42.0}]


def spec(cache: CacheInfo = CacheInfo(512), **options: object) -> EngineSpec:
    return EngineSpec("m", Options(path="m.gguf", **options), {"main": cache})  # type: ignore[arg-type]


def pairs(made: EngineSpec) -> dict[str, str]:
    argv = arguments(made, Path("m.gguf"), 64, 16)
    return dict(zip(argv[::2], argv[1::2], strict=True))


def fake_program(folder: Path, body: str, name: str = "llama-bench") -> str:
    for each, text in (("llama-server", "exit 1"), (name, body)):
        (folder / each).write_text(f"#!/bin/sh\n{text}\n")
        (folder / each).chmod(0o755)
    return str(folder / "llama-server")


def test_settings_become_arguments() -> None:
    flags = pairs(
        spec(
            CacheInfo(512, type_k="q8_0", type_v="q4_0", n_batch=256, n_ubatch=128, flash_attn=True),
            llama_server_n_threads=3,
            llama_server_n_gpu_layers="all",
        )
    )
    assert flags["--threads"] == "3"
    assert (flags["--batch-size"], flags["--ubatch-size"]) == ("256", "128")
    assert (flags["--cache-type-k"], flags["--cache-type-v"]) == ("q8_0", "q4_0")
    assert (flags["--flash-attn"], flags["--n-gpu-layers"]) == ("on", "-1")
    assert (flags["--n-prompt"], flags["--n-gen"]) == ("64", "16")


def test_unset_fields_add_no_arguments() -> None:
    assert pairs(spec()).keys().isdisjoint({"--threads", "--batch-size", "--flash-attn", "--n-gpu-layers"})


def test_rates_are_parsed() -> None:
    assert parse_rates(json.dumps(OUTPUT).encode()) == (700.5, 42.0)


@pytest.mark.parametrize("output", [b"", b"nonsense", b"[]", b'[{"n_prompt": 1, "avg_ts": 2}]'])
def test_unexpected_output_is_an_error(output: bytes) -> None:
    with pytest.raises(Unavailable, match="not as expected"):
        parse_rates(output)


def test_bench_runs_the_program(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    binary = fake_program(tmp_path, f"echo '{json.dumps(OUTPUT)}'")
    made = EngineSpec("m", Options(path=str(tmp_path / "m.gguf"), llama_server_binary=binary), {"main": CacheInfo(512)})
    assert bench(made, 64, 16) == (700.5, 42.0)


def test_failure_is_reported_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    binary = fake_program(tmp_path, "echo 'no such tensor' >&2; exit 3")
    made = EngineSpec("m", Options(path=str(tmp_path / "m.gguf"), llama_server_binary=binary), {"main": CacheInfo(512)})
    with pytest.raises(Unavailable, match="exit code 3: no such tensor"):
        bench(made, 64, 16)


def test_missing_program_is_an_error(tmp_path: Path) -> None:
    binary = fake_program(tmp_path, "exit 0", "something-else")
    made = spec(llama_server_binary=binary)
    assert program(made.options) is None
    with pytest.raises(NotFound, match="no llama-bench"):
        bench(made, 64, 16)
