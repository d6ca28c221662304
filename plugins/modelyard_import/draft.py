"""What an import has found so far: settings under Modelyard's names, and what it must tell the user."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Literal

from msgspec import Struct, field

from modelyard.config.problems import ConfigPath, Table, format_path

Change = Literal["changed", "dropped", "to do"]


class Remark(Struct, frozen=True):
    """About one setting of the source: its meaning is not quite the same (`changed`), it has no counterpart
    (`dropped`), or something is left for the user (`to do`)."""

    kind: Change
    setting: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.setting}: {self.text}"


class Draft(Struct):
    """A configuration in the making."""

    data: Table = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    variables: set[str] = field(default_factory=set)  # of the environment, which it names

    def set(self, value: Any, *path: str) -> None:
        table = self.data
        for key in path[:-1]:
            table = table.setdefault(key, {})
        table[path[-1]] = value

    def add(self, section: str, entry: Table) -> None:
        """To a list of tables, such as routes and keys."""
        self.data.setdefault(section, []).append(entry)

    def tell(self, kind: Change, path: ConfigPath | str, text: str) -> None:
        self.remarks.append(Remark(kind, path if isinstance(path, str) else format_path(path), text))

    def needs_variable(self, setting: str, variable: str) -> None:
        """Of an API key, or of a key for another server."""
        self.variables.add(variable)
        if variable not in os.environ:
            self.tell("to do", setting, f"the environment variable {variable} is not set")

    def drop_rest(self, path: ConfigPath, rest: Table, why: str = "has no counterpart") -> None:
        for key in rest:
            self.tell("dropped", (*path, key), why)


def add_key(draft: Draft, setting: str, name: str, variable: str | None, secret: str, **rules: Any) -> None:
    """An API key: the variable that holds it, else its hash. A secret itself is not copied into another file."""
    if variable is not None:
        draft.needs_variable(setting, variable)
        draft.add("keys", {"name": name, "env": variable, **rules})
    else:
        digest = hashlib.sha256(secret.encode()).hexdigest()
        draft.add("keys", {"name": name, "hash": f"sha256:{digest}", **rules})
        draft.tell("changed", setting, "the key works as before; the file holds its hash only")
