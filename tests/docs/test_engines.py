"""docs/engines.md: its examples load, and its tables match the code."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import modelyard_exllamav3 as exllamav3
import modelyard_litellm as litellm
import modelyard_vllm as vllm
from docs.field_tables import field_rows
from modelyard import plugins
from modelyard.config.load import load_config
from modelyard.core.engine import Capabilities
from modelyard.core.request import Sampling
from modelyard.engines import llama_cpp, llama_server, openai_remote
from modelyard_vllm import serve as vllm_serve
from tests.docs.pages import DOCS, blocks

FILE = DOCS / "engines.md"
PAGE = FILE.read_text()
COMMON = {"path", "chat_template", "enable_thinking"}  # fields of every model, documented in config.md
MODULES = (exllamav3, litellm, llama_server, openai_remote, vllm, vllm_serve)
SAMPLERS = len(Sampling.__struct_fields__)


# --- capabilities ---------------------------------------------------------------------------------------------

COLUMNS = ("tools", "structured", "logprobs", "lora", "embeddings", "rerank")
HEADS = ("tools", "structured", "logprobs", "LoRA", "embeddings", "rerank")
FAMILIES = ("dry_", "xtc_", "mirostat")


def capabilities() -> Iterator[str]:
    heads = ["engine", "takes", "where it runs", "images", *HEADS, "ignored sampling fields"]
    yield from (f"| {' | '.join(heads)} |", "|---" * len(heads) + "|")
    for name in plugins.names("engines"):
        module = plugins.engine(name)
        yield _row(name, module, module.capabilities)


def _row(name: str, module: Any, can: Capabilities) -> str:
    cells = [f"`{name}`", "tokens" if module.kind == "text" else "conversations", _where(module, module.kind)]
    cells += [_tick("image" in can.modalities), *(_tick(getattr(can, column)) for column in COLUMNS)]
    ignored = dict.fromkeys(f"`{_family(each, can)}`" for each in can.ignored)
    return f"| {' | '.join([*cells, ', '.join(ignored) if len(can.ignored) < SAMPLERS else 'all'])} |"


def _family(name: str, can: Capabilities) -> str:
    """One name for sampling fields of a family, if the engine ignores all of them."""
    for family in FAMILIES:
        members = {each for each in Sampling.__struct_fields__ if each.startswith(family)}
        if name in members and members <= set(can.ignored):
            return f"{family}*"
    return name


def _where(module: Any, kind: str) -> str:
    if module.remote:
        return "on another server"
    if kind == "chat":
        return "a child process"
    return (
        "a separate process" if module is not llama_cpp.ENGINE and module.own_process(None) else "the gateway's process"
    )


def _tick(can: bool) -> str:
    return "yes" if can else "–"


# --- tables -----------------------------------------------------------------------------------------------------------


def tables() -> dict[str, list[str]]:
    rows = {"capabilities": list(capabilities())}
    for module in MODULES:
        hidden = COMMON | (vllm.Options.model_fields.keys() if module is vllm_serve else set())
        fields = {name: info for name, info in module.Options.model_fields.items() if name not in hidden}
        name = module.__name__.removeprefix("modelyard.engines.").removeprefix("modelyard_").replace(".", "_")
        rows[f"fields {name}"] = list(field_rows(fields))
    return rows


@pytest.mark.parametrize("name", tables())
def test_tables_match_the_code(name: str) -> None:
    text = FILE.read_text()
    begin, end = (f"<!-- {name}: {mark} -->" for mark in ("begin", "end"))
    before, _, rest = text.partition(begin)
    fresh = before + begin + "\n" + "\n".join(tables()[name]) + "\n" + end + rest.partition(end)[2]
    if os.environ.get("MODELYARD_GOLDEN") == "write":
        FILE.write_text(fresh)
    assert text == fresh, "run the tests with MODELYARD_GOLDEN=write to update the tables"


def test_tables_have_no_unknown_field() -> None:
    engines = [plugins.engine(name) for name in plugins.names("engines")]
    known = {name for module in engines for name in module.Options.model_fields}
    before, _, rest = PAGE.partition("<!-- architectures: begin -->")
    page = before + rest.partition("<!-- architectures: end -->")[2]
    rows = [line for line in page.splitlines() if line.startswith("| `") and not line.startswith("| `modelyard ")]
    assert {line.split("`")[1] for line in rows} <= known | set(plugins.names("engines"))


def test_load_overrides_are_documented() -> None:
    for module in (exllamav3, llama_server, vllm, vllm_serve):
        assert [name for name in module.LIVE_OVERRIDES if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize("example", blocks("engines.md", "toml"))
def test_every_example_loads(example: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(example)
    loaded = load_config(tmp_path / "config.toml", env={})
    settings: dict[str, Any] = tomllib.loads(example)["models"]
    assert set(loaded.config.models) == set(settings)
    assert [problem for problem in loaded.problems if problem.level == "error"] == []
