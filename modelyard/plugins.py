"""Load a plug-in by name: the file or package name is the registered name.

`backend = "llama_cpp"` means `modelyard/engines/llama_cpp`; nothing registers itself and nothing lists them by hand.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from types import ModuleType

from modelyard.core.errors import InvalidRequest


class UnknownPlugin(InvalidRequest):
    default_code = "unknown_plugin"


class MissingLibrary(InvalidRequest):
    default_code = "missing_library"


@cache
def names(package: str) -> tuple[str, ...]:
    """Every plug-in that `modelyard.<package>` holds, without importing any of them.

    A module opts out by a leading underscore or by being listed in the package's `NOT_PLUGINS`.
    """
    home = importlib.import_module(f"modelyard.{package}")
    shared: frozenset[str] = getattr(home, "NOT_PLUGINS", frozenset())
    found = (m.name for m in pkgutil.iter_modules(home.__path__))
    return tuple(sorted(n for n in found if not n.startswith("_") and n not in shared))


def verify(module: ModuleType) -> None:
    """Raise where the plug-in's native library does not work on this machine; one without such a library works."""
    check: Callable[[], None] | None = getattr(module, "verify", None)
    if check is not None:
        check()


def load(package: str, name: str) -> ModuleType:
    if name not in names(package):
        close = difflib.get_close_matches(name, names(package), 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UnknownPlugin(f"{name!r} is none of {package}: {', '.join(names(package))}.{hint}")
    try:
        return importlib.import_module(f"modelyard.{package}.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("modelyard"):
            raise
        raise MissingLibrary(
            f"{name} needs the Python package {error.name!r}: install it with pip install 'modelyard[{name}]'"
        ) from error
