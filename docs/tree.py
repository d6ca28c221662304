"""Writes the package tree of ARCHITECTURE.md from the docstrings of the packages; a test checks that it is current.

python docs/tree.py            print it
python docs/tree.py --write    put it into ARCHITECTURE.md
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "modelyard"
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- tree: begin -->", "<!-- tree: end -->"
_WIDTH = 26


def first_line(module: Path) -> str:
    text = ast.get_docstring(ast.parse(module.read_text()))
    return text.splitlines()[0] if text else ""


def rows(folder: Path, depth: int = 0) -> Iterator[str]:
    """One line per package, with its number of modules."""
    modules = len(list(folder.glob("*.py")))
    name = f"{'  ' * depth}{folder.name}/ ({modules})"
    yield f"{name:<{_WIDTH}} {first_line(folder / '__init__.py')}".rstrip()
    for inner in sorted(p for p in folder.iterdir() if (p / "__init__.py").exists()):
        yield from rows(inner, depth + 1)


def tree() -> str:
    return "\n".join(rows(PACKAGE))


def page() -> str:
    """ARCHITECTURE.md with a current tree."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n```text\n{tree()}\n```\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(tree())
