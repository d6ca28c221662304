"""vLLM's exceptions as our errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from modelyard.core.errors import ENGINE_DIED, ContextOverflow, Internal, InvalidRequest, ModelyardError, Unavailable
from modelyard.core.request import Constraint
from modelyard.engines.grammars import bad_grammar
from modelyard.processes.child_process import describe_exit

log = logging.getLogger(__name__)

_UNREADABLE, _UNUSABLE = "model_unreadable", "model_unusable"
_ABOUT_GRAMMAR = re.compile(r"grammar|schema|regex|structured", re.IGNORECASE)
# «… (length 300) is longer than the maximum model length of 256 …». The window was checked before, but only vLLM knows
# how many tokens an image has.
_TOO_LONG = re.compile(r"\(length (\d+)\).*maximum model length of (\d+)", re.DOTALL)


def request_error(
    error: Exception, request_errors: tuple[type[Exception], ...], constraint: Constraint | None = None
) -> ModelyardError:
    """`request_errors` are the types that vLLM raises if the request is at fault."""
    if isinstance(error, ModelyardError):
        return error
    message = str(error)
    if not isinstance(error, request_errors):
        internal = Internal("vLLM could not answer")
        log.error("a request of vLLM failed (id %s)", internal.id, exc_info=error)
        return internal
    if found := _TOO_LONG.search(message):
        return ContextOverflow(int(found[1]), int(found[2]))
    if constraint is not None and _ABOUT_GRAMMAR.search(message):
        return bad_grammar(constraint, message)
    return InvalidRequest(f"vLLM refused the request: {message}", code="refused_by_engine")


def first_token_error(exit_codes: Sequence[int | None]) -> InvalidRequest:
    hint = "if by SIGILL, the processor lacks an instruction for this number format: try vllm_dtype = float32"
    return InvalidRequest(f"{death_error(exit_codes).message} at the first token ({hint})", code=_UNUSABLE)


def load_error(error: Exception, model: str) -> InvalidRequest:
    """The message often says only that a process failed; the cause is in vLLM's log (`with_cause`)."""
    return InvalidRequest(f"vLLM cannot load {model}: {error}", code=_UNREADABLE)


def with_cause(error: ModelyardError, cause: str) -> ModelyardError:
    """Replaces the reason of a failed load by the cause from the log of vLLM's processes."""
    if error.code not in (_UNREADABLE, _UNUSABLE) or not cause or cause in error.message:
        return error
    return InvalidRequest(f"{error.message.partition(': ')[0]}: {cause}", code=error.code)


def death_error(exit_codes: Sequence[int | None]) -> Unavailable:
    exits = [describe_exit(code) for code in exit_codes if code is not None]
    message = f"vLLM's engine process {exits[0]}" if exits else "vLLM's engine process died"
    return Unavailable(message, code=ENGINE_DIED)
