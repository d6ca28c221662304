"""docs/engines.md: its examples load, and its tables are the engines' own fields."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from modelyard.config import load
from modelyard.engines import litellm, llama_server, openai_remote
from tests.docs.pages import DOCS, blocks

PAGE = (DOCS / "engines.md").read_text()
COMMON = {"path", "chat_template", "enable_thinking"}  # fields of every model: config.md has them


@pytest.mark.parametrize("options", [llama_server.Options, openai_remote.Options, litellm.Options])
def test_every_field_is_in_its_table_with_its_meaning(options: type[BaseModel]) -> None:
    for name, info in options.model_fields.items():
        if name not in COMMON:
            (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
            assert row.endswith(f"| {info.description} |")


def test_no_field_is_in_the_tables_that_no_engine_has() -> None:
    known = {name for module in (llama_server, openai_remote, litellm) for name in module.Options.model_fields}
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert {line.split("`")[1] for line in rows} <= known


def test_the_fields_of_one_load_are_named() -> None:
    for name in llama_server.LIVE_OVERRIDES:
        assert f"`{name}`" in PAGE


@pytest.mark.parametrize("example", blocks("engines.md", "toml"))
def test_every_example_loads(example: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(example)
    loaded = load(tmp_path / "config.toml", env={})
    settings: dict[str, Any] = tomllib.loads(example)["models"]
    assert set(loaded.config.models) == set(settings)
    assert [problem for problem in loaded.problems if problem.level == "error"] == []
