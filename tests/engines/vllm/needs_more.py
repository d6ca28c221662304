"""Imports what is not installed, as vLLM does without one of its libraries."""

import a_library_of_vllm as a_library_of_vllm  # type: ignore[import-not-found]
