"""How an agent is started, as data: the server and the model that it uses, and its arguments, variables and files.

`write_files` carries out what a plan says about files; `shell_script` shows the whole plan as shell commands.

An editor's settings file is JSON with comments and trailing commas, which stay as they are. Nothing that is there is
changed: an object gets the members that it lacks, a list the items that it lacks, and anything else that is there
stays.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from modelyard.core.errors import Unavailable

_TOKEN = re.compile(
    r"(?P<blank>\s+|//[^\n]*|/\*.*?\*/)"
    r'|(?P<string>"(?:[^"\\]|\\.)*")'
    r"|(?P<mark>[\[\]{},:])"
    r"|(?P<word>[^\s\[\]{},:\"/]+)",
    re.DOTALL,
)
_INDENT = "  "


class _Node(Struct):
    """A value in the text. `inside` is the position behind the opening bracket of an object or a list."""

    value: Any
    inside: int = -1
    members: dict[str, _Node] = field(default_factory=dict)


def add_settings(text: str, settings: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The text with the settings that it lacks, and the names of those for which it has another value. Raises
    ValueError if the text is not an object."""
    root = _Parser(text if text.strip() else "{}").document()
    if not isinstance(root.value, dict):
        raise ValueError("the file does not hold an object")
    insertions: dict[int, str] = {}
    kept: list[str] = []
    _merge(root, settings, (), insertions, kept)
    new = text if text.strip() else "{}"
    for at, added in sorted(insertions.items(), reverse=True):
        new = new[:at] + added + new[at:]
    return (new if new.endswith("\n") or not insertions else new + "\n"), kept


def _merge(
    node: _Node, wanted: Mapping[str, Any], path: tuple[str, ...], insertions: dict[int, str], kept: list[str]
) -> None:
    missing = [
        f"{json.dumps(name)}: {_dump(value, len(path) + 1)}" for name, value in wanted.items() if name not in node.value
    ]
    if missing:
        insertions[node.inside] = _inserted(missing, bool(node.value), len(path))
    for name, value in wanted.items():
        if name not in node.value:
            continue
        found, here = node.members[name], (*path, name)
        if isinstance(value, Mapping) and isinstance(found.value, dict):
            _merge(found, value, here, insertions, kept)
        elif isinstance(value, list) and isinstance(found.value, list):
            new = [_dump(item, len(here) + 1) for item in value if not _has(found.value, item)]
            if new:
                insertions[found.inside] = _inserted(new, bool(found.value), len(here))
        elif found.value != value:
            kept.append(".".join(here))


def _has(items: list[Any], wanted: Any) -> bool:
    """Items with a name are the same if their names are."""
    if isinstance(wanted, Mapping) and "name" in wanted:
        return any(isinstance(item, dict) and item.get("name") == wanted["name"] for item in items)
    return wanted in items


def _inserted(entries: list[str], is_first_of_more: bool, depth: int) -> str:
    lines = ",".join(f"\n{_INDENT * (depth + 1)}{entry}" for entry in entries)
    return f"{lines}," if is_first_of_more else f"{lines}\n{_INDENT * depth}"


def _dump(value: Any, depth: int) -> str:
    return json.dumps(value, indent=len(_INDENT)).replace("\n", f"\n{_INDENT * depth}")


class _Parser:
    def __init__(self, text: str) -> None:
        self._words = self._split(text)
        self._word, self._at = next(self._words)

    @staticmethod
    def _split(text: str) -> Iterator[tuple[str, int]]:
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise ValueError(f"unexpected {text[at]!r} in line {text.count(chr(10), 0, at) + 1}")
            if found.lastgroup != "blank":
                yield found.group(), at
            at = found.end()
        yield "", at

    def document(self) -> _Node:
        node = self._value()
        if self._word:
            raise ValueError(f"unexpected {self._word[:20]!r} after the end")
        return node

    def _next(self) -> str:
        word = self._word
        if not word:
            raise ValueError("the text ends too early")
        self._word, self._at = next(self._words)
        return word

    def _expect(self, mark: str) -> None:
        if (word := self._next()) != mark:
            raise ValueError(f"unexpected {word[:20]!r} instead of {mark!r}")

    def _value(self) -> _Node:
        inside = self._at + 1
        word = self._next()
        if word == "{":
            members = dict(self._members())
            return _Node({name: member.value for name, member in members.items()}, inside, members)
        if word == "[":
            return _Node([item.value for item in self._items("]")], inside)
        return _Node(json.loads(word))

    def _members(self) -> Iterator[tuple[str, _Node]]:
        while self._word != "}":
            if not (name := self._next()).startswith('"'):
                raise ValueError(f"unexpected {name[:20]!r} instead of a name")
            self._expect(":")
            yield json.loads(name), self._value()
            if self._word != "}":
                self._expect(",")
        self._next()

    def _items(self, end: str) -> Iterator[_Node]:
        while self._word != end:
            yield self._value()
            if self._word != end:
                self._expect(",")
        self._next()


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


def as_json(settings: Mapping[str, Any] | list[Any]) -> str:
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
