"""vLLM's exceptions as our errors, and what its log says: the reason of a failure, the progress of loading.

(EngineCore pid=812) ERROR 11-15 09:51:02 [core.py:1101] ValueError: To serve at least one request with …
"""

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


_STAMP = re.compile(r"^(\([^()]*pid=\d+\) *)?((DEBUG|INFO|WARNING|ERROR) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_CAUSE = re.compile(
    r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Failure)): (?P<why>.*\S)"
    r"|^(?:Value error|Assertion failed), |^Input should be "
    r"|^(?:vllm|api_server\.py|usage: vllm).*: error: "
    r"|^Fatal Python error|^cannot start |Segfault encountered|Illegal instruction|[Oo]ut of memory"
)
_NOTE = re.compile(r"^(\([^()]*pid=\d+\) *)?(DEBUG|INFO|WARNING)[ :]|checkpoint shards:|Warning: ")
_SETTINGS_DUMP = re.compile(r" \[type=(?:value|assertion)_error,.*")  # pydantic repeats all settings
_CONSEQUENCE = re.compile(
    r"validation errors? for|See root cause above|died unexpectedly|EngineDeadError|Failed core proc"
)
_MAX_REASONS, _TAIL_LINES, _MAX_WIDTH = 3, 5, 400


def failure_reason(lines: Sequence[str]) -> str:
    """The first causes in the log, without repetitions and consequences. Without a cause, the last lines above the
    level of a warning. Empty if a signal killed the program."""
    texts = [_strip(line) for line in lines if not _NOTE.search(line)]
    causes = [text for text in texts if _CAUSE.search(text)]
    roots = [text for text in causes if not _CONSEQUENCE.search(text)] or causes
    if roots:
        return "; ".join(list(dict.fromkeys(roots))[:_MAX_REASONS])
    return " | ".join([text for text in texts if text][-_TAIL_LINES:])


def _strip(line: str) -> str:
    text = _SETTINGS_DUMP.sub("", _STAMP.sub("", line.rpartition("\r")[2]))
    return re.sub(r"\s+", " ", text).strip()[:_MAX_WIDTH]


# (text in the log, progress, description)
_STAGES = (
    ("Initializing a V1 LLM engine", 0.1, "starting the engine"),
    ("Starting to load model", 0.2, "loading the weights"),
    ("Loading weights took", 0.6, "allocating the KV cache"),
    ("Dynamo bytecode transform", 0.65, "compiling"),
    ("KV cache size", 0.7, "allocating the KV cache"),
    ("Capturing CUDA graph", 0.75, "capturing CUDA graphs"),
    ("Starting vLLM", 0.9, "starting the HTTP server"),
)
_SHARDS = re.compile(r"checkpoint shards: +(\d+)% Completed")


def startup_stage(lines: Sequence[str]) -> tuple[float, str]:
    """The progress of loading, and its description."""
    done, stage = 0.05, "starting vllm serve"
    for line in lines:
        if shards := _SHARDS.search(line.rpartition("\r")[2]):
            done, stage = max((done, stage), (0.2 + 0.4 * int(shards[1]) / 100, "loading the weights"))
        for text, at, description in _STAGES:
            if at > done and text in line:
                done, stage = at, description
    return done, stage
