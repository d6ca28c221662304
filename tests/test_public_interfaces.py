"""The package and its plug-ins use no private name of another distribution or of Python's library, and replace nothing.

A private name is one with a leading underscore. Three things are looked at: the source (imports, attributes, module
names in strings, assignments to what another module owns), the classes with a foreign base (what they override, and
what they read from it), and the places where mypy was told to accept a replaced method.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
OWN = "modelyard"
PLUGINS = ROOT / "plugins"
FILES = sorted([*(ROOT / OWN).rglob("*.py"), *PLUGINS.rglob("*.py")])
FOREIGN = frozenset(packages_distributions()) | sys.stdlib_module_names
# Public all the same: their documentation names them.
DOCUMENTED = frozenset(
    {
        *("_asdict", "_fields", "_make", "_replace"),  # of named tuples
        *("_fields_", "_handle", "_length_", "_name", "_pack_", "_type_"),  # of ctypes
        "_exit",  # of os
    }
)
SETTINGS = frozenset(  # of a library, which it documents as variables to be set
    {
        *("logging.logThreads", "logging.logProcesses", "logging.logMultiprocessing"),
        "app.config.socket_io_js_transports",  # of NiceGUI
    }
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != "" and name not in DOCUMENTED


def is_own(module: str) -> bool:
    return module.split(".")[0] == OWN or module.startswith(f"{OWN}_")


def is_private_module(name: str) -> bool:
    first, *rest = name.split(".")
    return first in FOREIGN and not is_own(first) and any(map(is_private, [first, *rest]))


# --- the source -------------------------------------------------------------------------------------------------------


def found_in_source(text: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(text)
    foreign, own = set(foreign_names(tree)), set(of_another_instance(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, one.name) for one in names if is_private_module(one.name))
            case ast.ImportFrom(module=str(module), names=names, level=0) if not is_own(module):
                for one in names:
                    if is_private_module(module) or is_private(one.name):
                        yield node.lineno, f"{module}.{one.name}"
            case ast.Constant(value=str(value)) if re.fullmatch(r"\w+(\.\w+)+", value) and is_private_module(value):
                yield node.lineno, value
            case ast.Attribute(value=owner, attr=name) if is_private(name) and not is_own_object(owner):
                if node not in own:
                    yield node.lineno, ast.unparse(node)
            case ast.Attribute(attr="__globals__" | "__code__" | "__closure__"):
                yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr"), args=[owner, name, *_]):
                is_literal = isinstance(name, ast.Constant) and is_private(str(name.value))
                if is_literal and not is_own_object(owner):
                    yield node.lineno, ast.unparse(node)
                elif ast.unparse(node.func) in ("setattr", "delattr") and ast.unparse(owner).split(".")[0] in foreign:
                    yield node.lineno, f"{ast.unparse(node)} changes a foreign object"
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                yield from ((node.lineno, said) for said in replaced(targets, foreign))
    for line, code in enumerate(text.splitlines(), 1):
        if re.search(r"# type: ignore\[[^]]*method-assign", code):
            yield line, "a method is replaced"


def is_own_object(node: ast.expr) -> bool:
    return ast.unparse(node) in ("self", "cls", "super()")


def of_another_instance(tree: ast.Module) -> Iterator[ast.Attribute]:
    """In a class, `other._x` of a local variable, where the class has an `_x` of its own."""
    for cls in ast.walk(tree):
        if isinstance(cls, ast.ClassDef):
            defined, _ = names_in(cls)
            for node in ast.walk(cls):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in defined:
                    yield node


def foreign_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((one.asname or one.name).split(".")[0] for one in node.names if not is_own(one.name))
        elif isinstance(node, ast.ImportFrom) and not node.level and not is_own(str(node.module)):
            yield from (one.asname or one.name for one in node.names)


def replaced(targets: list[ast.expr], foreign: set[str]) -> Iterator[str]:
    for name in map(ast.unparse, targets):
        if re.fullmatch(r"\w+(\.\w+)+", name) and name.split(".")[0] in foreign and name not in SETTINGS:
            yield f"{name} is replaced"


# --- classes with a foreign base --------------------------------------------------------------------------------------


def found_in_class(cls: type) -> Iterator[str]:
    """Private names of a foreign base that the class defines or uses."""
    line = cls.__mro__
    own = [base for base in line if is_own(base.__module__)]
    inherited = {name for base in line if base not in own for name in names_of(base)[0]}
    defined = {name for base in own for name in names_of(base)[0]}
    for name in sorted(names_of(cls)[0] & inherited):
        yield f"{cls.__qualname__}.{name} replaces one of a foreign base"
    if inherited or any(not is_own(base.__module__) and base.__module__ not in ("builtins", "typing") for base in line):
        for name in sorted(names_of(cls)[1] - defined):
            yield f"{cls.__qualname__} reads {name}, which a foreign base defines"


@cache
def names_of(cls: type) -> tuple[frozenset[str], frozenset[str]]:
    """Those of `names_in`. A class without a source has those of its attributes."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # of C, or made while the program runs
        return frozenset(filter(is_private, vars(cls))), frozenset()
    return names_in(tree)


def names_in(tree: ast.AST) -> tuple[frozenset[str], frozenset[str]]:
    """The private names that a class defines, itself or in its methods, and those that its methods read."""
    defined, read = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_private(node.name):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and is_private(node.id):
            defined.add(node.id)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) in ("self", "cls"):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.attr)
    return frozenset(defined), frozenset(read)


def classes_of(file: Path) -> Iterator[type]:
    names = [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    if not names:
        return
    at = file.relative_to(PLUGINS if file.is_relative_to(PLUGINS) else ROOT)
    try:
        module: Any = importlib.import_module(".".join(at.with_suffix("").parts))
    except ModuleNotFoundError:  # a plug-in's library is not installed: its source alone is looked at
        if not file.is_relative_to(PLUGINS):
            raise
        return
    yield from (cls for name in names if isinstance(cls := getattr(module, name), type))


# --- tests ------------------------------------------------------------------------------------------------------------


def test_the_package_and_its_plugins_touch_no_private_name_of_another_distribution() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {what}" for file in FILES for line, what in found_in_source(file.read_text())
    ]
    assert found == []


def test_no_class_overrides_or_reads_a_private_name_of_a_foreign_base() -> None:
    assert [
        f"{file.relative_to(ROOT)}: {what}"
        for file in FILES
        for cls in classes_of(file)
        for what in found_in_class(cls)
    ] == []


@pytest.mark.parametrize(
    "line",
    [
        "from httpx._config import create_ssl_context",
        "import httpx._config",
        "from re import _parser",
        "importlib.import_module('re._parser')",
        "connector._factory = Connection",
        "getattr(generator, '_legacy_seeding')(1)",
        "setattr(connector, '_factory', None)",
        "import aiohttp\naiohttp.ClientSession.get = mine",
        "import json as fast\nfast.dumps = mine",
        "from jinja2 import Template\nsetattr(Template, 'render', mine)",
        "template.root_render_func.__globals__.update(x=1)",
        "cycle.send = send  # type: ignore[method-assign]",
    ],
)
def test_a_line_that_reaches_into_another_library_is_found(line: str) -> None:
    assert list(found_in_source(line))


@pytest.mark.parametrize(
    "line",
    [
        "self._x = cls._y",
        "class A:\n    def _x(self, other):\n        return other._x()",
        "from modelyard.scanner.formats._common import regions",
        "os._exit(1)",
        "point._replace(x=1)",
    ],
)
def test_what_is_own_or_documented_is_not(line: str) -> None:
    assert not list(found_in_source(line))


class Overriding(ast.NodeVisitor, inspect.Signature):
    def _hash_basis(self) -> tuple[Any, ...]:
        return ()


class Reading(inspect.Signature):
    def first(self) -> Any:
        return self._parameters


@pytest.mark.parametrize(("cls", "name"), [(Overriding, "_hash_basis"), (Reading, "_parameters")])
def test_a_class_that_uses_the_inside_of_its_base_is_found(
    cls: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "OWN", "tests")
    assert [said for said in found_in_class(cls) if name in said]
