"""Plug-ins by name: the name of a module or package is the name of the plug-in.

`backend = "llama_cpp"` means `modelyard/engines/llama_cpp`. There is no registry.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Literal

from modelyard.core.errors import InvalidRequest


class UnknownPlugin(InvalidRequest):
    default_code = "unknown_plugin"


class MissingLibrary(InvalidRequest):
    default_code = "missing_library"


@cache
def names(package: str) -> tuple[str, ...]:
    """The plug-ins of `modelyard.<package>`, without importing them.

    Modules with a leading underscore and those in the package's `NOT_PLUGINS` are not plug-ins.
    """
    parent = importlib.import_module(f"modelyard.{package}")
    excluded: frozenset[str] = getattr(parent, "NOT_PLUGINS", frozenset())
    found = (module.name for module in pkgutil.iter_modules(parent.__path__))
    return tuple(sorted(name for name in found if not name.startswith("_") and name not in excluded))


def verify(module: ModuleType) -> None:
    """Raise if the plug-in's native library does not work on this machine."""
    check: Callable[[], None] | None = getattr(module, "verify", None)
    if check is not None:
        check()


def prepare(module: ModuleType, progress: object) -> None:
    """Fetch what the plug-in needs on this machine, at its first use. `progress` is a `ProgressReporter`."""
    setup: Callable[[object], object] | None = getattr(module, "prepare", None)
    if setup is not None:
        setup(progress)


def engine_kind(module: ModuleType, options: object) -> Literal["text", "chat"]:
    kind: Literal["text", "chat"] = getattr(options, "kind", module.KIND)
    return kind


def is_remote_engine(name: str | None) -> bool:
    """Whether the engine's models run on a server elsewhere. An engine that is unknown, or whose library is missing, is
    reported where it is loaded."""
    try:
        return name in names("engines") and bool(getattr(load("engines", name), "REMOTE", False))
    except MissingLibrary:
        return False


def unknown(kind: str, name: str, known: Sequence[str]) -> UnknownPlugin:
    """The error for an unknown name. It lists the known ones."""
    close = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return UnknownPlugin(f"{name!r} is not one of the {kind}: {', '.join(known)}.{hint}")


def load(package: str, name: str) -> ModuleType:
    if name not in names(package):
        raise unknown(package, name, names(package))
    try:
        return importlib.import_module(f"modelyard.{package}.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("modelyard"):
            raise
        raise MissingLibrary(
            f"{name} needs the Python package {error.name!r}: install it with pip install 'modelyard[{name}]'"
        ) from error
