"""Changes the text of a configuration file and writes it, with a backup beside it.

Comments and order stay: only the lines of what changes are touched. A comment directly above a section belongs to it.
Each new text is read back and compared with what was meant; a syntax that cannot be edited is refused, never guessed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tomllib
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import tomlkit
from msgspec import Struct
from tomlkit.container import OutOfOrderTableProxy
from tomlkit.exceptions import TOMLKitError

from modelyard.config.problems import ConfigPath, Table, format_path, path_exists
from modelyard.config.sources import TomlStatement, toml_statements
from modelyard.core.errors import Conflict, Unavailable

# --- edits ------------------------------------------------------------------------------------------------------------


class SetValue(Struct, frozen=True):
    """A value at a path of keys; sections on the way are created."""

    path: ConfigPath
    value: Any


class RemoveValue(Struct, frozen=True):
    """A key, a section with all that is in it, or an entry of a list."""

    path: ConfigPath


class InsertEntry(Struct, frozen=True):
    """A new entry of a list of tables, before the one that has its number now."""

    path: ConfigPath
    table: Table


class MoveEntry(Struct, frozen=True):
    """An entry of a list to another place in it."""

    path: ConfigPath
    to: int


FileEdit = SetValue | RemoveValue | InsertEntry | MoveEntry


def edit_text(kind: str, text: str, edits: Sequence[FileEdit]) -> str:
    """The text of a `.toml` or `.json` file with the edits, one after the other. Raises Conflict."""
    for edit in edits:
        meant = _edited(_loads(kind, text), edit)
        candidates = _toml_candidates(text, edit) if kind == ".toml" else _json_candidates(text, edit)
        text = _first_that_says(meant, kind, candidates, edit)
    return text


def _loads(kind: str, text: str) -> Table:
    found: Table = (tomllib.loads(text) if kind == ".toml" else json.loads(text)) if text.strip() else {}
    return found


def _first_that_says(meant: Table, kind: str, candidates: Iterator[str], edit: FileEdit) -> str:
    for candidate in candidates:
        try:
            if _without_empty(_loads(kind, candidate)) == _without_empty(meant):
                return candidate
        except ValueError:
            continue
    raise Conflict(f"{format_path(edit.path)} cannot be changed in the way in which it is written; edit the file")


def _without_empty(data: Table) -> Table:
    """`[models]` without models says as much as no such section."""
    return {key: value for key, value in data.items() if value not in ({}, [])}


def _edited(data: Table, edit: FileEdit) -> Table:
    """What the file should say afterwards."""
    data = deepcopy(data)
    *parents, last = edit.path
    table: Any = data
    for depth, key in enumerate(parents):
        if isinstance(edit, SetValue) and isinstance(table, dict) and key not in table:
            table[key] = {}
        if isinstance(edit, InsertEntry) and isinstance(table, dict) and key not in table:
            table[key] = []
        if not path_exists(table, (key,)):
            raise Conflict(f"there is no {format_path(edit.path[: depth + 1])} in the file")
        table = table[key]
        if not isinstance(table, dict | list):
            raise Conflict(f"{format_path(edit.path[: depth + 1])} is not a section: it has a value")
    if isinstance(edit, SetValue):
        table[last] = edit.value
    elif isinstance(edit, InsertEntry):
        table.insert(last, edit.table)
    elif not path_exists(table, (last,)):
        raise Conflict(f"there is no {format_path(edit.path)} in the file")
    elif isinstance(edit, MoveEntry):
        table.insert(edit.to, table.pop(last))
    else:
        del table[last]
    return data


def _at(data: Any, path: ConfigPath) -> Any:
    for key in path:
        data = data[key]
    return data


# --- TOML -------------------------------------------------------------------------------------------------------------

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_value(value: Any) -> str:
    """On one line, but for a text that has several."""
    if isinstance(value, Mapping):
        items = ", ".join(f"{toml_key(key)} = {toml_value(inner)}" for key, inner in value.items())
        return f"{{ {items} }}" if items else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str) and "\n" in value:
        return tomlkit.string(value, multiline=True).as_string()
    return str(tomlkit.item(value).as_string())


def toml_key(*keys: str | int) -> str:
    return ".".join(
        key if _BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False) for key in keys if isinstance(key, str)
    )


def toml_lines_of(header: str, table: Table) -> list[str]:
    """A section as lines."""
    lines = [header]
    for key, value in table.items():
        lines += f"{toml_key(key)} = {toml_value(value)}".split("\n")
    return lines


def toml_fragment(changes: Mapping[tuple[str, ...], Any]) -> str:
    """Sections with nothing but these values."""
    return edit_text(".toml", "", [SetValue(path, value) for path, value in changes.items()]).strip()


def _toml_candidates(text: str, edit: FileEdit) -> Iterator[str]:
    document = TomlText(text)
    if isinstance(edit, SetValue):
        yield from document.with_value(edit.path, edit.value)
    elif isinstance(edit, RemoveValue):
        yield from document.without(edit.path)
    elif isinstance(edit, InsertEntry):
        yield document.with_entry(edit.path, edit.table)
    else:
        yield document.with_moved_entry(edit.path, edit.to)
    try:
        yield _by_tomlkit(text, edit)
    except (TOMLKitError, KeyError, IndexError, TypeError, AttributeError):
        return


def _by_tomlkit(text: str, edit: FileEdit) -> str:
    """For inline tables, dotted keys and lists of them. Comments between sections may move."""
    document = tomlkit.parse(text)
    *parents, last = edit.path
    table: Any = document
    for depth, key in enumerate(parents):
        if isinstance(table, MutableMapping | OutOfOrderTableProxy) and key not in table:
            table[key] = [] if isinstance(edit, InsertEntry) else tomlkit.table(is_super_table=depth == 0)
        table = table[key]
    if isinstance(edit, SetValue):
        table[last] = edit.value
    elif isinstance(edit, InsertEntry):
        table.insert(last, _inline(edit.table))
    elif isinstance(edit, MoveEntry):
        table.insert(edit.to, table.pop(last))
    else:
        del table[last]
    return tomlkit.dumps(document)


def _inline(table: Table) -> Any:
    made = tomlkit.inline_table()
    made.update(table)
    return made


class TomlBlock(Struct, frozen=True):
    """A section with the comment directly above its header: the lines from `start` to `end`, counted from 0, of which
    those behind `content_end` are empty or comments of their own."""

    path: ConfigPath
    start: int
    content_end: int
    end: int


class TomlText:
    """A text by its lines. The methods return new texts."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")
        self._statements = list(toml_statements(text))

    # --- blocks -------------------------------------------------------------------------------------------------------

    def blocks(self) -> list[TomlBlock]:
        headers = [statement for statement in self._statements if statement.is_header]
        starts = [self._with_comment_above(header.line - 1) for header in headers]
        ends = [*starts[1:], len(self._lines)] if headers else []
        return [
            TomlBlock(header.path, start, self._content_end(header.line, end), end)
            for header, start, end in zip(headers, starts, ends, strict=True)
        ]

    def _with_comment_above(self, line: int) -> int:
        while line > 0 and self._lines[line - 1].lstrip().startswith("#"):
            line -= 1
        return line

    def _content_end(self, header: int, end: int) -> int:
        """Behind the last key, and the comments directly below it."""
        last = max((each.end for each in self._statements if header <= each.line <= end), default=header)
        while last < end and self._lines[last].lstrip().startswith("#"):
            last += 1
        return last

    def _replaced(self, start: int, end: int, lines: Sequence[str]) -> str:
        return "\n".join([*self._lines[:start], *lines, *self._lines[end:]])

    def with_block(self, at: int, lines: Sequence[str]) -> str:
        """A section before the line `at`, with an empty line before and after it."""
        before, after = self._lines[:at], self._lines[at:]
        while before and not before[-1].strip():
            before.pop()
        while after and not after[0].strip():
            after.pop(0)
        gap = [""] if before else []
        return "\n".join([*before, *gap, *lines, *([""] if after else []), *after]).rstrip("\n") + "\n"

    def without_lines(self, start: int, end: int) -> str:
        """An empty line that separated the removed ones from the rest goes with them."""
        before, after = self._lines[:start], self._lines[end:]
        while after and not after[0].strip() and (not before or not before[-1].strip()):
            after.pop(0)
        text = "\n".join([*before, *after])
        return text.rstrip("\n") + "\n" if text.strip() else ""

    # --- values -------------------------------------------------------------------------------------------------------

    def with_value(self, path: ConfigPath, value: Any) -> Iterator[str]:
        for statement in self._statements:
            holds = not statement.is_header and path[: len(statement.path)] == statement.path
            if holds and (text := self._with_changed_statement(statement, path, value)) is not None:
                yield text
        key, section = path[-1], path[:-1]
        block = next((block for block in self.blocks() if block.path == section), None)
        if block is not None:
            yield self._with_key(block, str(key), value)
        elif (outer := next((block for block in self.blocks() if block.path == section[:-1]), None)) and section:
            yield self._with_key(outer, str(section[-1]), {key: value})
        yield self.with_block(self.place_for(path), toml_lines_of(f"[{toml_key(*section)}]", {str(key): value}))

    def _with_changed_statement(self, statement: TomlStatement, path: ConfigPath, value: Any) -> str | None:
        """Its comment stays."""
        part: Any = tomlkit.parse("\n".join(self._lines[statement.line - 1 : statement.end]))
        inner = path[len(statement.path) - 1 :]
        table = part
        try:
            for key in inner[:-1]:
                table = table[key]
            table[inner[-1]] = _toml_item(value)
        except (TOMLKitError, KeyError, TypeError):
            return None
        return self._replaced(statement.line - 1, statement.end, tomlkit.dumps(part).rstrip("\n").split("\n"))

    def _with_key(self, block: TomlBlock, key: str, value: Any) -> str:
        own = [each for each in self._statements if not each.is_header and block.start < each.line <= block.end]
        line = self._lines[own[-1].line - 1] if own else ""
        indent = line[: len(line) - len(line.lstrip())]
        new = f"{indent}{toml_key(key)} = {toml_value(value)}".split("\n")
        return self._replaced(block.content_end, block.content_end, new)

    def place_for(self, path: ConfigPath) -> int:
        """Behind the last section of the same kind, else at the end."""
        alike = [block.content_end for block in self.blocks() if block.path[0] == path[0]]
        return alike[-1] if alike else len(self._lines)

    def without(self, path: ConfigPath) -> Iterator[str]:
        for statement in self._statements:
            if not statement.is_header and statement.path == path:
                yield self.without_lines(statement.line - 1, statement.end)
        blocks = [block for block in self.blocks() if block.path[: len(path)] == path]
        if blocks:
            text = "\n".join(self._lines)
            for block in reversed(blocks):
                text = TomlText(text).without_lines(block.start, block.content_end)
            yield text

    # --- entries of a list of sections --------------------------------------------------------------------------------

    def with_entry(self, path: ConfigPath, table: Table) -> str:
        found = [block for block in self.blocks() if block.path == path]
        at = found[0].start if found else self.place_for(path)
        return self.with_block(at, toml_lines_of(f"[[{toml_key(*path[:-1])}]]", table))

    def with_moved_entry(self, path: ConfigPath, to: int) -> str:
        blocks = [block for block in self.blocks() if block.path[: len(path)] == path]
        if not blocks:
            return ""
        moved = self._lines[blocks[0].start : blocks[-1].content_end]
        rest = TomlText(self.without_lines(blocks[0].start, blocks[-1].content_end))
        found = [block for block in rest.blocks() if block.path == (*path[:-1], to)]
        return rest.with_block(found[0].start if found else rest.place_for(path), moved)


def _toml_item(value: Any) -> Any:
    return tomlkit.parse(f"value = {toml_value(value)}")["value"]


# --- JSON -------------------------------------------------------------------------------------------------------------

_SPACE = re.compile(r"[ \t\r\n]*")
_decoder = json.JSONDecoder()


def _json_candidates(text: str, edit: FileEdit) -> Iterator[str]:
    text = text if text.strip() else "{}\n"
    data = _edited(json.loads(text), edit)
    path = edit.path
    index = next((number for number, key in enumerate(path) if isinstance(key, int)), None)
    if index is not None:  # a list is written as a whole
        path = path[:index]
    keys = tuple(map(str, path))
    if path_exists(data, path):
        yield _set_json(text, keys, _at(data, path))
    else:
        yield _without_json(text, keys)


def _set_json(text: str, path: tuple[str, ...], value: Any) -> str:
    at = _skip_space(text, 0)
    for depth, key in enumerate(path):
        members = _members(text, at)
        if key not in members:
            nested: Any = value
            for inner in reversed(path[depth + 1 :]):
                nested = {inner: nested}
            return _insert_member(text, at, members, key, nested)
        at = members[key][0]
    return text[:at] + _json_value(value, _indent(text, at)) + text[members[key][1] :]


def _without_json(text: str, path: tuple[str, ...]) -> str:
    at = _skip_space(text, 0)
    for key in path[:-1]:
        at = _members(text, at)[key][0]
    members = _members(text, at)
    names = list(members)
    number = names.index(path[-1])
    if number > 0:  # with the comma before it
        return text[: members[names[number - 1]][1]] + text[members[path[-1]][1] :]
    end = members[path[-1]][1]
    comma = _skip_space(text, end)
    end = _skip_space(text, comma + 1) if text[comma] == "," else end
    return text[: _skip_space(text, at + 1)] + text[end:]


def _json_value(value: Any, indent: str) -> str:
    """Tables on several lines, as people write them."""
    if isinstance(value, dict | list) and value and not all(isinstance(each, str | int | float) for each in value):
        return json.dumps(value, ensure_ascii=False, indent=2).replace("\n", f"\n{indent}")
    return json.dumps(value, ensure_ascii=False)


def _indent(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip())]


def _members(text: str, at: int) -> dict[str, tuple[int, int]]:
    """The start and end of each value of the object that begins at `at`."""
    found: dict[str, tuple[int, int]] = {}
    at = _skip_space(text, at + 1)
    while text[at] != "}":
        key, at = _decoder.raw_decode(text, at)
        start = _skip_space(text, _skip_space(text, at) + 1)  # after the colon
        _, end = _decoder.raw_decode(text, start)
        found[key] = (start, end)
        at = _skip_space(text, end)
        at = _skip_space(text, at + 1) if text[at] == "," else at
    return found


def _insert_member(text: str, at: int, members: Mapping[str, tuple[int, int]], key: str, value: Any) -> str:
    """After the last member, on a line of its own if that one has one."""
    member = f"{json.dumps(key, ensure_ascii=False)}: "
    if not members:
        return text[: at + 1] + member + json.dumps(value, ensure_ascii=False) + text[_skip_space(text, at + 1) :]
    start, end = list(members.values())[-1]
    line = text[text.rfind("\n", 0, start) + 1 : start]
    has_own_line = "\n" in text[at:start] and line.lstrip().startswith('"')
    indent = line[: len(line) - len(line.lstrip())]
    separator = ",\n" + indent if has_own_line else ", "
    written = _json_value(value, indent) if has_own_line else json.dumps(value, ensure_ascii=False)
    return text[:end] + separator + member + written + text[end:]


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


# --- writing ----------------------------------------------------------------------------------------------------------

_CANNOT_REPLACE = (errno.EBUSY, errno.EXDEV)  # a single file that is mounted into a container


def decode(content: bytes) -> str:
    """With the line ends that edits use. Raises UnicodeDecodeError."""
    return content.decode("utf-8-sig").replace("\r\n", "\n")


def encode(text: str, before: bytes | None) -> bytes:
    """With the line ends and the mark at the beginning that the file had."""
    before = before or b""
    text = text.replace("\n", "\r\n") if b"\r\n" in before else text
    return text.encode("utf-8-sig" if before.startswith(BOM_UTF8) else "utf-8")


def write_with_backup(file: Path, text: str, expected: bytes | None) -> Path | None:
    """Replace the file by `text` and return its backup; None for a new file. `expected` is the content that the text is
    based on; None: there is no file yet. If another program has changed it meanwhile, nothing is written."""
    file = file.resolve()  # a link stays one
    draft = file.with_name(f".{file.name}.new{file.suffix}")
    try:
        if expected is None:
            file.parent.mkdir(parents=True, exist_ok=True)
        elif not os.access(file, os.W_OK):  # a file that is replaced need not be writable, but it was meant so
            raise Unavailable(f"{file} cannot be written: it is read-only; it is unchanged", code="read_only")
        draft.write_bytes(encode(text, expected))
        if _content(file) != expected:
            raise changed_meanwhile(file)
        backup = None
        if expected is not None:
            shutil.copymode(file, draft)
            backup = _back_up(file)
        _replace(draft, file)
    except OSError as error:
        message = f"{file} cannot be written: {error.strerror}; it is unchanged"
        raise Unavailable(message, code="read_only" if error.errno in (errno.EACCES, errno.EROFS) else None) from error
    finally:
        _remove(draft)
    return backup


def restore(file: Path, written: str, before: bytes | None, backup: Path | None) -> str:
    """Undo `write_with_backup`, unless another program has changed the file since. Says what became of the file."""
    file = file.resolve()
    if _content(file) != encode(written, before):
        return f"another program has changed {file} meanwhile" + (f"; it was {backup} before" if backup else "")
    try:
        if before is None:
            file.unlink()
        else:
            draft = file.with_name(f".{file.name}.new{file.suffix}")
            draft.write_bytes(before)
            shutil.copymode(file, draft)
            _replace(draft, file)
            _remove(draft)
            if backup is not None:
                _remove(backup)
    except OSError as error:
        return f"{file} could not be restored ({error.strerror}); it was {backup} before"
    return f"{file} is as it was"


def _replace(draft: Path, file: Path) -> None:
    try:
        os.replace(draft, file)
    except OSError as error:
        if error.errno not in _CANNOT_REPLACE:
            raise
        file.write_bytes(draft.read_bytes())


def _remove(draft: Path) -> None:
    try:
        draft.unlink(missing_ok=True)
    except OSError:  # the folder is read-only, so it was not written
        return


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.exists() else None


def changed_meanwhile(file: Path) -> Conflict:
    message = f"another program has changed {file} since it was read; nothing was written"
    return Conflict(message, code="file_changed")


def _back_up(file: Path) -> Path:
    """Beside the file, never over another backup, and with the file's suffix: it can be loaded like the file."""
    for number in range(1000):
        backup = file.with_name(f"{file.stem}.bak{f'.{number}' if number else ''}{file.suffix}")
        if not backup.exists():
            shutil.copy2(file, backup)
            return backup
    raise Conflict(f"{file} has a thousand backups: remove some")
