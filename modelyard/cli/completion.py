"""Shell completion of model names: those of the configuration and of the library, without asking a server."""

from __future__ import annotations

from modelyard.core.errors import ModelyardError


def complete_models(incomplete: str) -> list[str]:
    return sorted(name for name in {*_configured(), *_in_library()} if name.startswith(incomplete))


def complete_library(incomplete: str) -> list[str]:
    return sorted(name for name in _in_library() if name.startswith(incomplete))


def _configured() -> set[str]:
    """Errors complete nothing: a shell has no place to show them."""
    from modelyard.config.load import load_config

    try:
        models = load_config().config.models
    except (ModelyardError, OSError):
        return set()
    return {*models, *(alias for model in models.values() for alias in model.aliases)}


def _in_library() -> set[str]:
    from modelyard.library.models import list_models

    try:
        return {entry.name for entry in list_models()}
    except (ModelyardError, OSError):
        return set()
