"""Which file a model path means; the library knows where to look."""

from __future__ import annotations

from modelyard.library.model_files import locate_model_file as find

__all__ = ["find"]
