"""The LiteLLM library itself: whether it is here, how it is imported, and what its exceptions carry."""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from types import ModuleType

from modelyard.plugins import MissingLibrary


def verify() -> None:
    if find_spec("litellm") is None:
        raise MissingLibrary(
            "litellm needs the Python package 'litellm': install it with pip install 'modelyard[litellm]'"
        )


def load() -> ModuleType:
    """Takes seconds."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the internet for prices when imported
    library = importlib.import_module("litellm")
    vars(library).update(telemetry=False, suppress_debug_info=True)
    return library


def retry_after(error: Exception) -> str | None:
    """In the provider's headers, where the exception has kept them."""
    for headers in (getattr(error, "litellm_response_headers", None), getattr(error, "headers", None)):
        if headers is not None and (told := headers.get("retry-after")) is not None:
            return str(told)
    return None
