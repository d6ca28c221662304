"""A plan as lines for a POSIX shell: what `modelyard launch --print` shows. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from modelyard.launch.plan import Plan

_END = "END_OF_FILE"


def lines(plan: Plan, program: str, own: Sequence[str]) -> str:
    return "\n".join(_lines(plan, [program, *plan.arguments, *own])) + "\n"


def _lines(plan: Plan, command: Sequence[str]) -> Iterator[str]:
    for note in plan.notes:
        yield f"# {note}"
    for path, text in plan.initial.items():
        yield f"mkdir -p {_quoted(path.parent)}"
        yield f"[ -e {_quoted(path)} ] || printf %s {shlex.quote(text)} > {_quoted(path)}"
    for path, text in plan.files.items():
        yield f"mkdir -p {_quoted(path.parent)}"
        yield f"cat > {_quoted(path)} <<'{_END}'\n{text.rstrip()}\n{_END}"
    if plan.unset:
        yield f"unset {' '.join(plan.unset)}"
    for name, value in plan.env.items():
        yield f"export {name}={shlex.quote(value)}"
    yield shlex.join(command)


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
