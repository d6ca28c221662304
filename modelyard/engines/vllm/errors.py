"""What vLLM raises, as our errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from modelyard.core.errors import ContextOverflow, Internal, InvalidRequest, ModelyardError, Unavailable
from modelyard.core.request import Constraint
from modelyard.engines.vllm.request import bad_grammar
from modelyard.processes.child_process import describe_exit

_UNREADABLE, _UNUSABLE = "model_unreadable", "model_unusable"
_OF_THE_FORM = re.compile(r"grammar|schema|regex|structured", re.IGNORECASE)

log = logging.getLogger(__name__)

# «… (length 300) is longer than the maximum model length of 256 …», which only pictures can bring about: the window was
# checked, but what a picture takes of it only vLLM knows.
_TOO_LONG = re.compile(r"\(length (\d+)\).*maximum model length of (\d+)", re.DOTALL)


def request_error(
    error: Exception, refused: tuple[type[Exception], ...], constraint: Constraint | None = None
) -> ModelyardError:
    """`refused` are the kinds that vLLM raises where the request is at fault."""
    if isinstance(error, ModelyardError):
        return error
    if isinstance(error, refused):
        return _refusal(str(error), constraint)
    internal = Internal("vLLM could not answer")
    log.error("a request of vLLM failed (id %s)", internal.id, exc_info=error)
    return internal


def _refusal(words: str, constraint: Constraint | None) -> InvalidRequest:
    if found := _TOO_LONG.search(words):
        return ContextOverflow(int(found[1]), int(found[2]))
    if constraint is not None and _OF_THE_FORM.search(words):
        return bad_grammar(constraint, words)
    return InvalidRequest(f"vLLM refused the request: {words}", code="refused_by_engine")


def first_token_error(exit_codes: Sequence[int | None]) -> InvalidRequest:
    told = death_error(exit_codes).message
    hint = "if by SIGILL, this processor lacks what the number format needs, and vllm_dtype = float32 may work"
    return InvalidRequest(f"{told} at the first token ({hint})", code=_UNUSABLE)


def load_error(error: Exception, model: str) -> InvalidRequest:
    """Its own words are often only that its process failed: the cause stands in the log, which vLLM writes itself."""
    told = f"vLLM cannot load {model}: {error}"
    return InvalidRequest(told, code=_UNREADABLE)


def with_cause(error: ModelyardError, cause: str) -> ModelyardError:
    """A load that failed, with the cause that vLLM's own processes have told."""
    if error.code not in (_UNREADABLE, _UNUSABLE) or not cause or cause in error.message:
        return error
    return InvalidRequest(f"{error.message.partition(': ')[0]}: {cause}", code=error.code)


def death_error(exit_codes: Sequence[int | None]) -> Unavailable:
    told = [describe_exit(code) for code in exit_codes if code is not None]
    return Unavailable(f"vLLM's engine process {told[0]}" if told else "vLLM's engine process died")
