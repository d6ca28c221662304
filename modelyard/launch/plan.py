"""How an agent is started, as data: the server and the model that it uses, and its arguments, variables and files.

`write_files` carries out what a plan says about files; `shell_script` shows the whole plan as shell commands.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from modelyard.core.errors import Unavailable
from modelyard.launch.settings_file import add_settings

PLACEHOLDER_KEY = "modelyard"  # agents refuse to start without a key, even if the server needs none
_HEREDOC_END = "END_OF_FILE"
_MAX_OUTPUT = 32_000


class LaunchTarget(Struct, frozen=True, kw_only=True):
    """The server and the model that an agent uses. `background` is the model name for small side requests."""

    url: str
    model: str
    window: int | None = None  # tokens; None: a remote model that does not report it
    background: str = ""
    key: str = PLACEHOLDER_KEY
    capabilities: tuple[str, ...] = ("completion", "tools")

    @property
    def v1_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def small_model(self) -> str:
        return self.background or self.model

    @property
    def max_output(self) -> int | None:
        """The longest answer that leaves most of the window to the conversation."""
        return None if self.window is None else min(_MAX_OUTPUT, self.window // 4)

    def is_smaller_than(self, tokens: int) -> bool:
        return self.window is not None and self.window < tokens

    def limits(self, window: str, output: str) -> dict[str, int]:
        """The window and the longest answer under an agent's names for them; nothing if the window is unknown."""
        return {} if self.window is None or self.max_output is None else {window: self.window, output: self.max_output}


class LaunchPlan(Struct, frozen=True, kw_only=True):
    """`arguments` go before the user's. `files` are written at every launch, `initial_files` only if they do not exist,
    because the agent writes to them. `user_settings` are added to the user's own files where they are missing. `notes`
    are shown to the user before the agent starts."""

    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)
    initial_files: Mapping[Path, str] = field(default_factory=dict)
    user_settings: Mapping[Path, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def as_json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


# --- files ------------------------------------------------------------------------------------------------------------


def write_files(plan: LaunchPlan) -> list[str]:
    """Write the plan's files. Returns what the user should know about changes of files of their own."""
    missing = {path: text for path, text in plan.initial_files.items() if not path.exists()}
    for path, text in {**plan.files, **missing}.items():
        _write(path, text)
    return [line for path, settings in plan.user_settings.items() for line in _add_to_file(path, settings)]


def _add_to_file(path: Path, settings: Mapping[str, Any]) -> Iterator[str]:
    """The old file is copied first. Values that the user has set stay as they are."""
    try:
        old = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        old = ""
    except (OSError, UnicodeDecodeError) as error:
        raise Unavailable(f"cannot read {path}: {error}") from error
    try:
        new, kept = add_settings(old, settings)
    except ValueError as error:
        raise Unavailable(f"{path} is not JSON, so nothing was added to it: {error}") from error
    if new != old:
        if old:
            backup = path.with_name(f"{path.name}.{datetime.now(UTC):%Y%m%d-%H%M%S}.bak")
            _write(backup, old)
            yield f"added the server to {path}; the file as it was: {backup}"
        else:
            yield f"added the server to {path}"
        _write(path, new)
    for name in kept:
        yield f"{path} keeps its own value of {name}"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # some files hold the API key
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror}") from error


# --- a plan as shell commands -----------------------------------------------------------------------------------------


def shell_script(plan: LaunchPlan, program: str, arguments: Sequence[str]) -> str:
    """The plan as commands for a POSIX shell: what `modelyard launch --print` shows."""
    return "\n".join(_shell_lines(plan, [program, *plan.arguments, *arguments])) + "\n"


def _shell_lines(plan: LaunchPlan, command: Sequence[str]) -> Iterator[str]:
    for note in plan.notes:
        yield f"# {note}"
    for path, settings in plan.user_settings.items():
        yield f"# Add to {path}, which is yours (a launch adds what is missing and keeps a copy of the file):"
        yield from (f"#   {line}" for line in as_json(settings).splitlines())
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
