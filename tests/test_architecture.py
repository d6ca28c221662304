"""ARCHITECTURE.md tells the truth: its tree is made of the docstrings, and every module has one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent


def load_tree() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tree", ROOT / "docs" / "tree.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tree_in_the_page_is_current():
    tree = load_tree()
    assert tree.PAGE.read_text() == tree.page(), "run `make architecture`"


def test_every_module_says_in_its_first_line_what_it_is():
    tree = load_tree()
    silent = [str(p.relative_to(ROOT)) for p in tree.PACKAGE.rglob("*.py") if not tree.first_line(p)]
    assert silent == []
