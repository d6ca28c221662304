"""What llama.cpp would fit to the machine, by its own program."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.engines.llama_server.knobs import fitted_layers, layers
from modelyard.engines.llama_server.options import Options
from tests.engines.llama_server.test_bench import fake_program


@pytest.mark.parametrize(
    ("said", "found"),
    [("-c 8192 -ngl -1", "-1"), ("--n-gpu-layers 17 -c 4096\n", "17"), ("-c 8192", None), ("", None), ("-ngl", None)],
)
def test_the_layers_are_read_out_of_its_arguments(said, found):
    assert layers(said) == found


def fitted(binary: str) -> str | None:
    return fitted_layers(Options(path="m.gguf", llama_server_binary=binary), Path("m.gguf"))


def test_it_is_asked_where_it_is_there(tmp_path: Path):
    assert fitted(fake_program(tmp_path, "echo '-c 512 -ngl 9'", "llama-fit-params")) == "9"


def test_where_it_is_not_there_or_fails_nothing_is_known(tmp_path: Path):
    assert fitted(fake_program(tmp_path, "exit 1", "llama-fit-params")) is None
    (tmp_path / "llama-fit-params").unlink()
    assert fitted(str(tmp_path / "llama-server")) is None
    assert fitted(str(tmp_path / "nothing")) is None
