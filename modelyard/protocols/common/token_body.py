"""The body of /tokenize, /detokenize and /apply-template, as llama-server and vLLM take it."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Struct

from modelyard.core import limits


class TokenBody(Struct, kw_only=True):
    model: limits.Name = ""
    content: limits.Text | None = None
    prompt: limits.Text | None = None
    messages: Annotated[list[Any], limits.Messages] | None = None
    tokens: limits.TokenIds | None = None
    with_pieces: bool = False
    return_token_strs: bool = False
    add_special: bool = False
    add_special_tokens: bool = False
