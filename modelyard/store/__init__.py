"""What must be remembered between requests: bounded, and scoped so that no API key sees another's."""

from __future__ import annotations

from modelyard.core.store import Store
from modelyard.plugins import load
from modelyard.store.settings import StoreSettings

NOT_PLUGINS = frozenset({"settings"})


def open_store(settings: StoreSettings) -> Store:
    """The store that the settings name; it may wait for a disk, so call it before the serving starts."""
    store: Store = load("store", settings.backend).create(settings)
    return store
