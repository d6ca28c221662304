"""Constraints as llguidance matchers, compiled on a separate thread after a child process has compiled them within its
limits (`grammar_check.py`). Shared by the engines that mask logits.

llguidance is imported on first use: other engines import this module for its errors only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.limits import MAX_GRAMMAR, MAX_SCHEMA
from modelyard.core.request import Constraint
from modelyard.engines.grammar_check import STACK_BYTES, translate
from modelyard.processes.sandbox import Stopped, pool

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")

_CACHE_SIZE = 16  # compiled grammars: agents send the same tools with every turn
_FIELDS = {"gbnf": "grammar", "regex": "regex", "lark": "lark", "json_schema": "response_format"}


class Grammars:
    """The grammars of one model. `load_tokenizer` is called on first use: a large vocabulary takes a second."""

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer]) -> None:
        self._load_tokenizer = load_tokenizer
        self._compiled: dict[tuple[str, str], LLMatcher | InvalidRequest] = {}  # the most recently used last
        self._pool: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        return self._load_tokenizer()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function on the compiler thread. Any thread may call it."""
        with self._starting:
            if self._pool is None:
                self._pool = _compiler_thread()
        return self._pool.submit(copy_context().run, function)  # with the client whose turn it is in the sandbox

    def close(self) -> None:
        """Waits for the running compilation; cancels the others."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """A new matcher at the start of the grammar. A grammar that was refused is refused again without work."""
        key = constraint.kind, constraint.text
        found = self._compiled.pop(key) if key in self._compiled else self._compile_or_refuse(constraint)
        self._compiled[key] = found
        if len(self._compiled) > _CACHE_SIZE:
            del self._compiled[next(iter(self._compiled))]
        if isinstance(found, InvalidRequest):
            raise type(found)(found.message, code=found.code, param=found.param)
        return found.deep_copy()

    def _compile_or_refuse(self, constraint: Constraint) -> LLMatcher | InvalidRequest:
        try:
            return self._compile(constraint)
        except InvalidRequest as error:
            return error

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

        limit = MAX_SCHEMA if constraint.tools or constraint.kind == "json_schema" else MAX_GRAMMAR
        if len(constraint.text) > limit:
            raise bad_grammar(constraint, f"it is longer than {limit} characters")
        if not constraint.text and constraint.kind in ("tools", "lark"):
            raise no_tool_grammar()
        try:
            grammar = pool.call(translate, constraint.kind, constraint.text)
        except InvalidRequest as error:
            raise bad_grammar(constraint, error.message) from error
        except Stopped as stopped:
            raise bad_grammar(constraint, f"{stopped.why}; use a simpler one") from None
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise bad_grammar(constraint, matcher.get_error())
        return matcher


def _compiler_thread() -> ThreadPoolExecutor:
    pool, default = ThreadPoolExecutor(1, "grammars"), threading.stack_size(STACK_BYTES)
    try:
        pool.submit(int)  # starts the thread
    finally:
        threading.stack_size(default)
    return pool


def _limits() -> LLParserLimits:
    """A step beyond them fails. All streams of the model wait for a step, so it must not take long."""
    from llguidance import LLParserLimits

    return LLParserLimits(step_max_items=20_000)


def bad_grammar(constraint: Constraint, reason: str) -> InvalidRequest:
    param = "tools" if constraint.tools else _FIELDS.get(constraint.kind)
    message = f"the {constraint.kind} cannot be compiled: {reason.strip()}"
    return InvalidRequest(message, code="bad_grammar", param=param)


def no_tool_grammar() -> Unsupported:
    return Unsupported("this model's tool format has no grammar: a tool call cannot be required", param="tool_choice")
