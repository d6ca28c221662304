"""Compiles a grammar in a child process of the pool first, which is killed if that takes too long or too much memory.

A grammar of a few hundred characters can take the compiler minutes, and nothing can interrupt it: `multipleOf: 999983`,
or a hundred patterns that must all match. So nothing is compiled in a server's process that a child has not compiled
within its limits. The child knows no vocabulary, only bytes and the control tokens that a grammar names; the work is in
the grammar. Whether a grammar is right is decided with the real vocabulary, in the server.

The child also translates, because the translator from GBNF takes time that is quadratic in the number of rules.
"""

from __future__ import annotations

import re
import threading
from importlib import import_module
from typing import Any

from modelyard.core.errors import InvalidRequest
from modelyard.processes.sandbox import Limits, sandboxed

# The compiler recurses as deep as rules refer to each other, and an overflow of its stack kills the process. This stack
# suffices for the deepest grammar of the maximum length. Untouched stack costs no memory.
STACK_BYTES = 1 << 28
# One spelling only: small models that may put white space anywhere never stop doing so.
JSON_SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Ten thousand characters of tools take about 0.1 s.
_LIMITS = Limits(cpu_s=5, wall_s=20, memory=(1 << 30) + 2 * STACK_BYTES)


def _load_library() -> None:
    for module in ("llguidance", "llguidance.gbnf_to_lark"):
        import_module(module)


def translated(kind: str, text: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    match kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=JSON_SPACING)
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(text or "{}", overrides=JSON_SPACING)
        case "gbnf":
            return LLMatcher.grammar_from_lark(gbnf_to_lark(text))
        case "regex":
            return LLMatcher.grammar_from_regex(text)
    return LLMatcher.grammar_from_lark(text)


_CONTROL_TOKEN = re.compile(r"<[^<>\[\]\s]+>")
_TOKEN_IDS = re.compile(r"(?<=<\[)[\^\d,-]+(?=\]>)")
_ID = re.compile(r"\d{3,}")
_HIGHEST_ID = "255"


class _Bytes:
    """A vocabulary of all bytes and these control tokens, as llguidance's TokenizerWrapper wants it."""

    eos_token_id, bos_token_id = 256, None

    def __init__(self, controls: list[str]) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *(control.encode() for control in controls)]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def compile_with_bytes(grammar: str) -> None:
    """Takes as long as with a real vocabulary. Errors do not count: they may be about the vocabulary."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    grammar = _TOKEN_IDS.sub(lambda found: _ID.sub(_HIGHEST_ID, found.group()), grammar)
    vocabulary: Any = _Bytes(sorted(set(_CONTROL_TOKEN.findall(grammar)))[:1000])
    LLMatcher(LLTokenizer(TokenizerWrapper(vocabulary), slices=[]), grammar, log_level=0)


@sandboxed(_LIMITS, _load_library)
def translate(kind: str, text: str) -> str:
    """The grammar in llguidance's own format, which was compiled once. InvalidRequest: it cannot be translated."""
    result: list[str | InvalidRequest] = []

    def work() -> None:
        try:
            grammar = translated(kind, text)
        except Exception as error:  # the converters raise plain exceptions
            result.append(InvalidRequest(str(error)))
            return
        compile_with_bytes(grammar)
        result.append(grammar)

    before = threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=work)
    thread.start()
    threading.stack_size(before)
    thread.join()
    (made,) = result
    if isinstance(made, InvalidRequest):
        raise made
    return made
