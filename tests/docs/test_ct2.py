"""docs/ct2.md: its example loads, its table matches the engine's options, and it lists the conversion formats."""

from __future__ import annotations

from pathlib import Path

import modelyard_ct2 as ct2
from modelyard.config.load import load_config
from modelyard_convert import QUANTIZATIONS
from modelyard_ct2.options import IGNORED
from tests.docs.pages import DOCS, blocks

PAGE = (DOCS / "ct2.md").read_text()


def test_table_has_every_option_with_its_description() -> None:
    rows = {line.split("`")[1]: line for line in PAGE.splitlines() if line.startswith("| `")}
    fields = {name: info for name, info in ct2.Options.model_fields.items() if name != "path"}
    assert set(rows) == set(fields)
    for name, info in fields.items():
        assert rows[name].endswith(f"| {info.description} |")


def test_live_overrides_are_named() -> None:
    assert all(f"`{name}`" in PAGE for name in ct2.LIVE_OVERRIDES)


def test_example_loads(tmp_path: Path) -> None:
    (example,) = blocks("ct2.md", "toml")
    (tmp_path / "config.toml").write_text(example)
    loaded = load_config(tmp_path / "config.toml", env={})
    assert loaded.config.models["smollm2-ct2"].backend == "ct2"
    assert [problem for problem in loaded.problems if problem.level == "error"] == []


def test_every_conversion_format_is_named() -> None:
    assert all(f"`{name}`" in PAGE for name in (*QUANTIZATIONS["ct2"], *QUANTIZATIONS["hf"]))


def test_ignored_sampling_fields_are_named_directly_or_by_family() -> None:
    families = {"presence": "presence", "frequency": "frequency", "dry": "DRY", "xtc": "XTC", "mirostat": "Mirostat"}
    for name in IGNORED:
        assert f"`{name}`" in PAGE or families.get(name.partition("_")[0], "nowhere") in PAGE
