from __future__ import annotations

from tests.scanner.writers._functions import turn as write

__all__ = ["write"]
