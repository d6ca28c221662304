"""Writes the tree of ARCHITECTURE.md from the first docstring line of each module; a test checks that it is current.

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
_WIDTH = 34


def first_line(module: Path) -> str:
    text = ast.get_docstring(ast.parse(module.read_text()))
    return text.splitlines()[0] if text else ""


def rows(folder: Path, depth: int = 0) -> Iterator[str]:
    """A folder's own line, then its modules, then its folders."""
    yield row(folder.name + "/", first_line(folder / "__init__.py"), depth)
    for module in sorted(folder.glob("*.py")):
        if module.name != "__init__.py":
            yield row(module.name, first_line(module), depth + 1)
    for inner in sorted(p for p in folder.iterdir() if (p / "__init__.py").exists()):
        yield from rows(inner, depth + 1)


def row(name: str, line: str, depth: int) -> str:
    return f"{'  ' * depth + name:<{_WIDTH}} {line}".rstrip()


def tree() -> str:
    return "\n".join(rows(PACKAGE))


def page() -> str:
    """ARCHITECTURE.md with a current tree in it."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n```text\n{tree()}\n```\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(tree())
