"""Constraints as llguidance matchers, compiled on a separate thread. Shared by the engines that mask logits.

llguidance is imported on first use: other engines import this module for its errors and its JSON spacing only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.request import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")

# The compiler recurses as deep as rules refer to each other, and an overflow of its stack kills the process. This stack
# suffices for the deepest grammar of the maximum length. Untouched stack costs no memory.
_STACK_BYTES = 1 << 28
_MAX_GENERATED = 1 << 18  # characters of schemas and tools
_MAX_WRITTEN = 1 << 15  # characters of a client's own grammar: some take quadratic time
_CACHE_SIZE = 16  # compiled grammars: agents send the same tools with every turn
# One spelling only: small models that may put white space anywhere never stop doing so.
JSON_SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FIELDS = {"gbnf": "grammar", "regex": "regex", "lark": "lark", "json_schema": "response_format"}


class Grammars:
    """The grammars of one model. `load_tokenizer` is called on first use: a large vocabulary takes a second."""

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer]) -> None:
        self._load_tokenizer = load_tokenizer
        self._compiled: dict[tuple[str, str], LLMatcher] = {}  # the most recently used last
        self._pool: ThreadPoolExecutor | None = None

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        return self._load_tokenizer()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function on the compiler thread."""
        if self._pool is None:
            self._pool = _compiler_thread()
        return self._pool.submit(function)

    def close(self) -> None:
        """Waits for the running compilation; cancels the others."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """A new matcher at the start of the grammar."""
        key = constraint.kind, constraint.text
        matcher = self._compiled.pop(key) if key in self._compiled else self._compile(constraint)
        self._compiled[key] = matcher
        if len(self._compiled) > _CACHE_SIZE:
            del self._compiled[next(iter(self._compiled))]
        return matcher.deep_copy()

    def matcher_if_valid(self, constraint: Constraint) -> LLMatcher | None:
        """None if a constraint with a trigger is invalid: the client did not ask for it."""
        try:
            return self.matcher(constraint)
        except InvalidRequest as error:
            if not constraint.trigger:
                raise
            log.warning("calls of %s are unconstrained: %s", ", ".join(constraint.tools) or "tools", error.message)
            return None

    def _compile(self, constraint: Constraint) -> LLMatcher:
        from llguidance import LLMatcher

        limit = _MAX_GENERATED if constraint.tools or constraint.kind == "json_schema" else _MAX_WRITTEN
        if len(constraint.text) > limit:
            raise bad_grammar(constraint, f"it is longer than {limit} characters")
        matcher = LLMatcher(self.tokenizer, _to_llguidance(constraint), log_level=0)
        if matcher.is_error():
            raise bad_grammar(constraint, matcher.get_error())
        return matcher


def _compiler_thread() -> ThreadPoolExecutor:
    pool, default = ThreadPoolExecutor(1, "grammars"), threading.stack_size(_STACK_BYTES)
    try:
        pool.submit(int)  # starts the thread
    finally:
        threading.stack_size(default)
    return pool


def _to_llguidance(constraint: Constraint) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    text = constraint.text
    try:
        match constraint.kind:
            case "json_object":
                return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=JSON_SPACING)
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(text or "{}", overrides=JSON_SPACING)
            case "gbnf":
                return LLMatcher.grammar_from_lark(gbnf_to_lark(text))
            case "regex":
                return LLMatcher.grammar_from_regex(text)
    except Exception as error:  # the converters raise plain exceptions
        raise bad_grammar(constraint, str(error)) from error
    if not text:
        raise no_tool_grammar()
    return LLMatcher.grammar_from_lark(text)


def bad_grammar(constraint: Constraint, reason: str) -> InvalidRequest:
    param = "tools" if constraint.tools else _FIELDS.get(constraint.kind)
    message = f"the {constraint.kind} cannot be compiled: {reason.strip()}"
    return InvalidRequest(message, code="bad_grammar", param=param)


def no_tool_grammar() -> Unsupported:
    return Unsupported("this model's tool format has no grammar: a tool call cannot be required", param="tool_choice")
