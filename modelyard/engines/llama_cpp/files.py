"""Which file a model path means; the library knows where to look."""

from __future__ import annotations

from modelyard.library.places import locate as find

__all__ = ["find"]
