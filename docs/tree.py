"""Writes the package tree and the table of plug-ins of ARCHITECTURE.md, from the docstrings of the packages and the
entry points of pyproject.toml; a test checks that they are current.

python docs/tree.py            print them
python docs/tree.py --write    put them into ARCHITECTURE.md
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "modelyard"
PLUGINS = ROOT / "plugins"
PAGE = ROOT / "ARCHITECTURE.md"
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


def plugins() -> str:
    """One row for each package of `plugins/`, with the names under which the entry points have it."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = ["| package | entry points | what it is |", "|---|---|---|"]
    for folder in sorted(p for p in PLUGINS.iterdir() if (p / "__init__.py").exists()):
        found = {
            group.removeprefix("modelyard."): sorted(
                name for name, place in names.items() if place.partition(":")[0].partition(".")[0] == folder.name
            )
            for group, names in groups.items()
        }
        names = " · ".join(f"{group}: {', '.join(f'`{n}`' for n in names)}" for group, names in found.items() if names)
        lines.append(f"| `{folder.name}` | {names} | {first_line(folder / '__init__.py').replace('|', '&#124;')} |")
    return "\n".join(lines)


def page() -> str:
    """ARCHITECTURE.md with a current tree and table."""
    text = PAGE.read_text()
    for name, part in (("tree", f"```text\n{tree()}\n```"), ("plug-ins", plugins())):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{part}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(tree(), plugins(), sep="\n\n")
