"""Plug-ins by name: engines, client protocols, output formats and more, in this tree or from any installed package.

In the tree the name of a module is the name of the plug-in: `backend = "llama_cpp"` means `modelyard/engines/llama_cpp`
and its `ENGINE`. Another package, such as those in `plugins/`, adds one with an entry point of the group
`modelyard.engines` (an `EnginePlugin`), `modelyard.protocols` (a `WireProtocol`), `modelyard.formats` (an
`OutputFormat`), `modelyard.clusters` (a `Cluster` of workers), `modelyard.converters` (a `Converter` of model files),
`modelyard.commands` (a function or an application for Typer), `modelyard.mcp` (parts of the MCP client)
or another one of `GROUPS`, which docs/extending.md describes. Both are loaded by the same call.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from modelyard.core.engine import EnginePlugin
from modelyard.core.errors import InvalidRequest, ModelyardError

GROUPS: Final = {
    "engines": "modelyard.engines",
    "protocols": "modelyard.protocols",
    "scanner.formats": "modelyard.formats",
    "clusters": "modelyard.clusters",
    "converters": "modelyard.converters",
    "commands": "modelyard.commands",
    "mcp": "modelyard.mcp",
    "mcp_servers": "modelyard.mcp_servers",
    "endpoints": "modelyard.endpoints",
    "observers": "modelyard.observers",
}
_ONLY_OUTSIDE = GROUPS.keys() - {"engines", "protocols", "scanner.formats"}


_OURS = "modelyard"  # the distribution, which brings some engines as packages of their own


class UnknownPlugin(InvalidRequest):
    default_code = "unknown_plugin"


class MissingLibrary(InvalidRequest):
    default_code = "missing_library"


class BrokenPlugin(MissingLibrary):
    """A plug-in of another package that cannot be used."""

    default_code = "broken_plugin"


@cache
def in_tree(package: str) -> tuple[str, ...]:
    """The plug-ins of `modelyard.<package>`, without importing them.

    Modules with a leading underscore and those in the package's `NOT_PLUGINS` are not plug-ins.
    """
    if package in _ONLY_OUTSIDE:
        return ()
    parent: Any = importlib.import_module(f"modelyard.{package}")
    excluded: frozenset[str] = vars(parent).get("NOT_PLUGINS", frozenset())
    found = (module.name for module in pkgutil.iter_modules(parent.__path__))
    return tuple(sorted(name for name in found if not name.startswith("_") and name not in excluded))


@cache
def outside(package: str) -> dict[str, list[EntryPoint]]:
    """The plug-ins of other packages: a name that two of them use is an error when it is loaded."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUPS[package]) if package in GROUPS else ():
        found.setdefault(point.name, []).append(point)
    return found


@cache
def names(package: str) -> tuple[str, ...]:
    return tuple(sorted({*in_tree(package), *outside(package)}))


def is_remote_engine(name: str | None) -> bool:
    """Whether the engine's models run on a server elsewhere. An unknown engine is reported where it is loaded."""
    try:
        return name in names("engines") and engine(name).remote
    except MissingLibrary:
        return False


def unknown(kind: str, name: str, known: Sequence[str]) -> UnknownPlugin:
    """The error for an unknown name. It lists the known ones."""
    close = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return UnknownPlugin(f"{name!r} is not one of the {kind}: {', '.join(known)}.{hint}")


def engine(name: str) -> EnginePlugin:
    found: EnginePlugin = load("engines", name)
    return found


def load(package: str, name: str) -> Any:
    """An engine's `EnginePlugin`, an output format from another package, and otherwise the module itself."""
    if name not in names(package):
        raise unknown(package, name, names(package))
    if name in outside(package):
        return _from_outside(package, name)
    try:
        module = importlib.import_module(f"modelyard.{package}.{name}")
    except ModuleNotFoundError as error:
        raise missing_library(name, error) from error
    return vars(module)["ENGINE"] if package == "engines" else module


def missing_library(name: str, error: ModuleNotFoundError) -> Exception:
    """What to install for one of our plug-ins whose import has failed; the error itself if a module of ours is gone."""
    if (error.name or "").startswith("modelyard"):
        return error
    return MissingLibrary(
        f"{name} needs the Python package {error.name!r}: install it with pip install 'modelyard[{name}]'"
    )


def _from_outside(package: str, name: str) -> Any:
    points = outside(package)[name]
    owners = [*([_OURS] if name in in_tree(package) else []), *(_owner(point) for point in points)]
    if len(owners) > 1:
        raise BrokenPlugin(f"{GROUPS[package]} {name!r} is defined by {' and by '.join(owners)}: uninstall one of them")
    try:
        found = points[0].load()
    except ModelyardError:
        raise
    except Exception as error:  # whatever a stranger's module does when it is imported
        if owners == [_OURS] and isinstance(error, ModuleNotFoundError):
            raise missing_library(name, error) from error
        reason = f"{type(error).__name__}: {error}"
        raise BrokenPlugin(f"{GROUPS[package]} {name!r} of {owners[0]} cannot be imported: {reason}") from error
    if package == "engines" and not isinstance(found, EnginePlugin):
        raise BrokenPlugin(f"{GROUPS[package]} {name!r} of {owners[0]} is not an EnginePlugin: {points[0].value}")
    return found


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value
