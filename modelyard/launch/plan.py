"""How to start an agent, as data: the server and model in, environment, files and arguments out. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

PLACEHOLDER_KEY = "modelyard"  # agents refuse to start without a key, even if the server needs none
_HEREDOC_END = "END_OF_FILE"


class LaunchTarget(Struct, frozen=True, kw_only=True):
    """The server and the model that an agent uses. `background` is the model name for small side requests."""

    url: str
    model: str
    window: int | None = None  # tokens; None: a remote model that does not report it
    background: str = ""
    key: str = PLACEHOLDER_KEY

    @property
    def v1_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def small_model(self) -> str:
        return self.background or self.model

    def is_smaller_than(self, tokens: int) -> bool:
        return self.window is not None and self.window < tokens


class LaunchPlan(Struct, frozen=True, kw_only=True):
    """`arguments` go before the user's. `files` are written at every launch, `initial_files` only if they do not exist,
    because the agent writes to them. `notes` are shown to the user before the agent starts."""

    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)
    initial_files: Mapping[Path, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def shell_script(plan: LaunchPlan, program: str, arguments: Sequence[str]) -> str:
    """The plan as commands for a POSIX shell: what `modelyard launch --print` shows."""
    return "\n".join(_shell_lines(plan, [program, *plan.arguments, *arguments])) + "\n"


def _shell_lines(plan: LaunchPlan, command: Sequence[str]) -> Iterator[str]:
    for note in plan.notes:
        yield f"# {note}"
    for path, text in plan.initial_files.items():
        file = shlex.quote(str(path))
        yield f"mkdir -p {shlex.quote(str(path.parent))}"
        yield f"[ -e {file} ] || printf %s {shlex.quote(text)} > {file}"
    for path, text in plan.files.items():
        yield f"mkdir -p {shlex.quote(str(path.parent))}"
        yield f"cat > {shlex.quote(str(path))} <<'{_HEREDOC_END}'\n{text.rstrip()}\n{_HEREDOC_END}"
    if plan.unset:
        yield f"unset {' '.join(plan.unset)}"
    for name, value in plan.env.items():
        yield f"export {name}={shlex.quote(value)}"
    yield shlex.join(command)
