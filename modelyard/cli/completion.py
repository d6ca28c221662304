"""Shell completion of model names: those of the configuration and of the library, without asking a server."""

from __future__ import annotations

from collections.abc import Iterator

from modelyard.core.errors import ModelyardError


def complete_models(incomplete: str) -> list[str]:
    """Errors complete nothing: a shell has no place to show them."""
    try:
        names = dict.fromkeys(_names())
    except (ModelyardError, OSError):
        return []
    return sorted(name for name in names if name.startswith(incomplete))


def _names() -> Iterator[str]:
    from modelyard.config.load import load_config
    from modelyard.library.models import list_models

    config = load_config().config
    yield from config.models
    yield from (alias for model in config.models.values() for alias in model.aliases)
    yield from (entry.name for entry in list_models())


def complete_library(incomplete: str) -> list[str]:
    from modelyard.library.models import list_models

    try:
        return sorted(entry.name for entry in list_models() if entry.name.startswith(incomplete))
    except (ModelyardError, OSError):
        return []
