"""The agents that `modelyard launch` knows: each file here is one, by its own name, with all that is peculiar to it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

from modelyard.core.errors import InvalidRequest
from modelyard.launch.plan import Agent, Facts, Plan

Planner = Callable[[Facts, Path], Plan]


def names() -> tuple[str, ...]:
    return tuple(sorted(module.name.rstrip("_") for module in iter_modules(__path__)))


def find(name: str) -> tuple[Agent, Planner]:
    """An agent and how it is planned: `plan(facts, home)`, where `home` is the folder for its private settings."""
    if name not in names():
        raise InvalidRequest(f"no agent {name!r}; there are {', '.join(names())}")
    module: ModuleType = import_module(f"{__name__}.{name}{'_' * iskeyword(name)}")
    return module.AGENT, module.plan
