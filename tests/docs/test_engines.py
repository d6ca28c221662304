"""docs/engines.md: its examples load, and its tables are the engines' own fields and what they can."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from modelyard import plugins
from modelyard.config.load import load_config
from modelyard.config.schema import field_rows
from modelyard.core.engine import Capabilities
from modelyard.core.request import Sampling
from modelyard.engines import exllamav3, litellm, llama_server, openai_remote, vllm, vllm_serve
from tests.docs.pages import DOCS, blocks

FILE = DOCS / "engines.md"
PAGE = FILE.read_text()
COMMON = {"path", "chat_template", "enable_thinking"}  # fields of every model: config.md has them
MODULES = (exllamav3, litellm, llama_server, openai_remote, vllm, vllm_serve)
SAMPLERS = len(Sampling.__struct_fields__)


# --- what each engine can ---------------------------------------------------------------------------------------------

COLUMNS = ("tools", "structured", "logprobs", "lora", "embeddings")
HEADS = ("tools", "structured", "logprobs", "LoRA", "embeddings")
FAMILIES = ("dry_", "xtc_", "mirostat")


def capabilities() -> Iterator[str]:
    heads = ["engine", "takes", "where it runs", "images", *HEADS, "sampling it ignores"]
    yield from (f"| {' | '.join(heads)} |", "|---" * len(heads) + "|")
    for name in plugins.names("engines"):
        module: Any = plugins.load("engines", name)
        yield _row(name, module, module.CAPABILITIES)


def _row(name: str, module: Any, can: Capabilities) -> str:
    kind = getattr(module, "KIND", None) or module.kind(None)
    cells = [f"`{name}`", "tokens" if kind == "text" else "conversations", _where(module, kind)]
    cells += [_tick("image" in can.modalities), *(_tick(getattr(can, column)) for column in COLUMNS)]
    ignored = dict.fromkeys(f"`{_family(each, can)}`" for each in can.ignored)
    return f"| {' | '.join([*cells, ', '.join(ignored) if len(can.ignored) < SAMPLERS else 'all'])} |"


def _family(name: str, can: Capabilities) -> str:
    """Samplers that go together are one word where none of them is honoured."""
    for family in FAMILIES:
        members = {each for each in Sampling.__struct_fields__ if each.startswith(family)}
        if name in members and members <= set(can.ignored):
            return f"{family}*"
    return name


def _where(module: Any, kind: str) -> str:
    if getattr(module, "REMOTE", False):
        return "on another server"
    if kind == "chat":
        return "a program of its own"
    return "a process of its own" if getattr(module, "OWN_PROCESS", False) else "the gateway's process"


def _tick(can: bool) -> str:
    return "yes" if can else "–"


# --- the tables, written anew where that is asked for -----------------------------------------------------------------


def tables() -> dict[str, list[str]]:
    shared = vllm.Options.model_fields
    own = {name: info for name, info in vllm_serve.Options.model_fields.items() if name not in {*shared, *COMMON}}
    return {
        "capabilities": list(capabilities()),
        "fields exllamav3": list(
            field_rows({n: info for n, info in exllamav3.Options.model_fields.items() if n not in COMMON})
        ),
        "fields vllm": list(field_rows({name: info for name, info in shared.items() if name not in COMMON})),
        "fields vllm_serve": list(field_rows(own)),
    }


@pytest.mark.parametrize("name", tables())
def test_the_tables_are_the_engines_own(name: str) -> None:
    text = FILE.read_text()
    begin, end = (f"<!-- {name}: {mark} -->" for mark in ("begin", "end"))
    before, _, rest = text.partition(begin)
    fresh = before + begin + "\n" + "\n".join(tables()[name]) + "\n" + end + rest.partition(end)[2]
    if os.environ.get("MODELYARD_GOLDEN") == "write":
        FILE.write_text(fresh)
    assert text == fresh, "run the tests with MODELYARD_GOLDEN=write to renew the tables"


@pytest.mark.parametrize("options", [module.Options for module in MODULES])
def test_every_field_is_in_its_table_with_its_meaning(options: type[BaseModel]) -> None:
    for name, info in options.model_fields.items():
        if name not in COMMON:
            (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
            assert row.endswith(f"| {info.description} |")


def test_no_field_is_in_the_tables_that_no_engine_has() -> None:
    engines = [plugins.load("engines", name) for name in plugins.names("engines")]
    known = {name for module in engines for name in module.Options.model_fields}
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert {line.split("`")[1] for line in rows} <= known | set(plugins.names("engines"))


@pytest.mark.parametrize("module", [exllamav3, llama_server, vllm, vllm_serve])
def test_the_fields_of_one_load_are_named(module: Any) -> None:
    for name in module.LIVE_OVERRIDES:
        assert f"`{name}`" in PAGE


@pytest.mark.parametrize("example", blocks("engines.md", "toml"))
def test_every_example_loads(example: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(example)
    loaded = load_config(tmp_path / "config.toml", env={})
    settings: dict[str, Any] = tomllib.loads(example)["models"]
    assert set(loaded.config.models) == set(settings)
    assert [problem for problem in loaded.problems if problem.level == "error"] == []
