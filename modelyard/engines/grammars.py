"""Constraints as llguidance's matchers, compiled on a thread of their own: what the engines that mask logits share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.request import Constraint

T = TypeVar("T")

# The compiler goes as deep as rules refer to each other, and where the stack ends it takes the process with it: there
# is room for the deepest grammar of this length. Memory that is never touched costs nothing.
_STACK = 1 << 28
_LONGEST, _LONGEST_WRITTEN = 1 << 18, 1 << 15  # of schemas and tools; of a client's own grammar: some take time squared
_KEPT = 16  # compiled grammars: agents send the same tools with every turn
# One way to write it: small models that may put white space anywhere never stop doing so.
_SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FIELDS = {"gbnf": "grammar", "regex": "regex", "lark": "lark", "json_schema": "response_format"}


class Grammars:
    """Those of one model. Compiling may take long, so `submit` does it on a thread that is nobody else's.

    `tokenizer` is asked once, on the first constraint: a large vocabulary takes a second.
    """

    def __init__(self, tokenizer: Callable[[], LLTokenizer]) -> None:
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, deed: Callable[[], T]) -> Future[T]:
        if self._pool is None:
            self._pool = _roomy_thread()
        return self._pool.submit(deed)

    def close(self) -> None:
        """Waits for what is being compiled; what has not begun is cancelled."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """A fresh one, at the grammar's beginning."""
        key = constraint.kind, constraint.text
        if key not in self._compiled:
            self._compiled[key] = self._compile(constraint)
        self._compiled.move_to_end(key)
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return self._compiled[key].deep_copy()

    def _compile(self, constraint: Constraint) -> LLMatcher:
        longest = _LONGEST if constraint.tools or constraint.kind == "json_schema" else _LONGEST_WRITTEN
        if len(constraint.text) > longest:
            raise _unusable(constraint, f"it is longer than {longest} characters")
        matcher = LLMatcher(self._tokenizer(), _grammar(constraint), log_level=0)
        if matcher.is_error():
            raise _unusable(constraint, matcher.get_error())
        return matcher


def _roomy_thread() -> ThreadPoolExecutor:
    pool, usual = ThreadPoolExecutor(1, "grammars"), threading.stack_size(_STACK)
    try:
        pool.submit(int)  # starts the thread
    finally:
        threading.stack_size(usual)
    return pool


def _grammar(constraint: Constraint) -> str:
    text = constraint.text
    try:
        match constraint.kind:
            case "json_object":
                return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_SPACING)
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(text or "{}", overrides=_SPACING)
            case "gbnf":
                return LLMatcher.grammar_from_lark(gbnf_to_lark(text))
            case "regex":
                return LLMatcher.grammar_from_regex(text)
    except Exception as error:  # the converter raises nothing more special
        raise _unusable(constraint, str(error)) from error
    if not text:
        raise Unsupported(
            "this model's way to call tools has no grammar: a call cannot be required", param="tool_choice"
        )
    return LLMatcher.grammar_from_lark(text)


def _unusable(constraint: Constraint, words: str) -> InvalidRequest:
    param = "tools" if constraint.tools else _FIELDS.get(constraint.kind)
    return InvalidRequest(f"the {constraint.kind} cannot be compiled: {words.strip()}", code="bad_grammar", param=param)
