"""The GPU layers that llama-fit-params chooses for the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.engines.llama_server import Options
from modelyard.engines.llama_server.knobs import fitted_layers
from tests.engines.llama_server.test_bench import fake_program


def fitted(binary: str) -> str | None:
    return fitted_layers(Options(path="m.gguf", llama_server_binary=binary), Path("m.gguf"))


@pytest.mark.parametrize(
    ("output", "layers"),
    [("-c 8192 -ngl -1", "-1"), ("--n-gpu-layers 17 -c 4096", "17"), ("-c 8192", None), ("", None), ("-ngl", None)],
)
def test_layers_are_parsed_from_the_output_of_the_program(tmp_path: Path, output: str, layers: str | None) -> None:
    assert fitted(fake_program(tmp_path, f"echo '{output}'", "llama-fit-params")) == layers


def test_layers_are_unknown_if_the_program_fails_or_is_missing(tmp_path: Path) -> None:
    assert fitted(fake_program(tmp_path, "exit 1", "llama-fit-params")) is None
    (tmp_path / "llama-fit-params").unlink()
    assert fitted(str(tmp_path / "llama-server")) is None
    assert fitted(str(tmp_path / "nothing")) is None
