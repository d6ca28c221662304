"""ARCHITECTURE.md is current and short, every module says what it is, and a class name means one thing."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections import defaultdict
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "modelyard"


def load_tree() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tree", ROOT / "docs" / "tree.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_package_tree_in_the_page_is_current() -> None:
    tree = load_tree()
    assert tree.PAGE.read_text() == tree.page(), "run `make architecture`"


def test_every_module_has_a_docstring() -> None:
    tree = load_tree()
    files = [*tree.PACKAGE.rglob("*.py"), *tree.PLUGINS.rglob("*.py")]
    without = [str(p.relative_to(ROOT)) for p in files if not tree.first_line(p)]
    assert without == []


def test_no_two_modules_have_a_public_class_of_the_same_name() -> None:
    places = defaultdict(list)
    for file in load_tree().PACKAGE.rglob("*.py"):
        for name in re.findall(r"^class ([A-Za-z]\w*)", file.read_text(), re.MULTILINE):
            places[name].append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_the_pages_that_everyone_reads_stay_short() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) <= 250
    terms = [line for line in text.partition("## Glossary")[2].splitlines() if line.startswith("| ")][1:]
    assert len(terms) <= 30
    results = (ROOT / "docs" / "performance.md").read_text().splitlines()
    assert len(results) <= 220
    assert max(map(len, results)) <= 200, "a line that packs many figures is a table"


def test_every_package_stands_in_the_layers_and_in_the_page() -> None:
    packages = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    packages -= {"__init__", "__main__"}
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = set(re.findall(r"modelyard\.(\w+)", " ".join(contracts[0]["layers"])))
    page = (ROOT / "ARCHITECTURE.md").read_text()
    drawn = page[page.index("## The layers") : page.index("- `protocols`, `router`")]
    assert layers == packages
    assert {name for name in packages if re.search(rf"\b{name}\b", drawn)} == packages
