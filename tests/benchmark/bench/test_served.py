"""The server that a measurement starts: when it cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelyard.benchmark.bench.served import served
from modelyard.core.errors import ModelyardError, Unavailable
from tests.serving import demo


async def test_a_server_that_ends_at_once_is_explained_by_its_last_words(tmp_path: Path) -> None:
    file = tmp_path / "modelyard.json"
    file.write_text('{"modelz": {}}')
    with pytest.raises(Unavailable, match=r"the server ended with exit code 2: (.|\n)*modelz"):
        async with served(file, "demo", None, lambda line: None):
            raise AssertionError


async def test_a_key_that_the_server_does_not_know_is_told(tmp_path: Path) -> None:
    file = tmp_path / "modelyard.json"
    file.write_text(json.dumps(demo() | {"keys": [{"name": "me", "key": "sesame-open-please"}]}))
    with pytest.raises(ModelyardError, match="key"):
        async with served(file, "demo", None, lambda line: None):
            raise AssertionError
