"""Compiles a grammar in a child process first, which is killed if that takes too long or too much memory.

    python -m modelyard.engines.grammar_check        JSON lines: {kind, text} in, {grammar} or {error} out

A grammar of a few hundred characters can take the compiler minutes, and nothing can interrupt it: `multipleOf: 999983`,
or a hundred patterns that must all match. So nothing is compiled in a server's process that a child has not compiled
within its limits. The child knows no vocabulary, only bytes and the control tokens that a grammar names; the work is in
the grammar. Whether a grammar is right is decided with the real vocabulary, in the server.

The child also translates, because the translator from GBNF takes time that is quadratic in the number of rules.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from modelyard.processes.parent_death import die_with_parent

try:
    import resource
except ImportError:  # Windows: the child has no limit but that of the clock
    resource = None  # type: ignore[assignment]

# The compiler recurses as deep as rules refer to each other, and an overflow of its stack kills the process. This stack
# suffices for the deepest grammar of the maximum length. Untouched stack costs no memory.
STACK_BYTES = 1 << 28
# One spelling only: small models that may put white space anywhere never stop doing so.
JSON_SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
CPU_S = 5  # of the child for one grammar; ten thousand characters of tools take about 0.1
_WALL_S = 20.0  # on a busy machine
_MAX_MEMORY = 1 << 30  # of the child, beyond its stacks
_COMMAND = (sys.executable, "-P", "-m", "modelyard.engines.grammar_check")
_IS_POSIX = os.name == "posix"


class TooExpensive(Exception):
    """Why a grammar is not compiled."""


class BadGrammar(Exception):
    """Why a grammar cannot be translated."""


# --- the parent -------------------------------------------------------------------------------------------------------


class GrammarChecker:
    """Owns one child. It is started for the first grammar, and again after one that killed it."""

    def __init__(self, wall_s: float = _WALL_S) -> None:
        self._wall_s = wall_s
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def translate(self, kind: str, text: str) -> str:
        """The grammar in llguidance's own format. Blocks for as long as it takes to compile."""
        line = json.dumps({"kind": kind, "text": text}).encode() + b"\n"
        with self._lock:
            if self._child is not None and self._child.poll() is not None:
                self._end()
            child = self._child = self._child or self._start()
            try:
                answer = self._ask(child, line)
            except (OSError, TooExpensive):
                self._end()
                raise
        if "error" in answer:
            raise BadGrammar(answer["error"])
        return str(answer["grammar"])

    def close(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - our own module
            die_with_parent(list(_COMMAND)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=_IS_POSIX,  # a Ctrl-C in the terminal is for the server
        )

    def _ask(self, child: subprocess.Popen[bytes], line: bytes) -> dict[str, Any]:
        assert child.stdin is not None  # noqa: S101
        assert child.stdout is not None  # noqa: S101
        try:
            child.stdin.write(line)
            child.stdin.flush()
        except BrokenPipeError:
            raise TooExpensive(_death(child.wait(1))) from None
        deadline, received = time.monotonic() + self._wall_s, b""
        while not received.endswith(b"\n"):
            if _IS_POSIX and not select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TooExpensive(f"it takes longer than {self._wall_s:g} s")
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                raise TooExpensive(_death(child.wait(1)))
            received += data
        answer: dict[str, Any] = json.loads(received)
        return answer

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with suppress(BrokenPipeError), child:  # closes the pipes and reaps it
                pass


def _death(code: int) -> str:
    if _IS_POSIX and -code in (signal.SIGXCPU, signal.SIGKILL):
        return f"it takes longer than {CPU_S} s"
    return "it needs too much memory, or is nested too deeply"


# --- the child --------------------------------------------------------------------------------------------------------


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
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    grammar = _TOKEN_IDS.sub(lambda found: _ID.sub(_HIGHEST_ID, found.group()), grammar)
    vocabulary: Any = _Bytes(sorted(set(_CONTROL_TOKEN.findall(grammar)))[:1000])
    LLMatcher(LLTokenizer(TokenizerWrapper(vocabulary), slices=[]), grammar, log_level=0)


def _answer(line: str) -> dict[str, str]:
    request = json.loads(line)
    try:
        grammar = translated(request["kind"], request["text"])
    except Exception as error:  # the converters raise plain exceptions
        return {"error": str(error)}
    compile_with_bytes(grammar)
    return {"grammar": grammar}


def _limit_cpu() -> None:
    """From now on; the limit counts from the start of the process."""
    if resource is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + CPU_S + 1, hard))


def _serve() -> None:
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY + 2 * STACK_BYTES, _MAX_MEMORY + 2 * STACK_BYTES))
    for line in sys.stdin:
        _limit_cpu()
        sys.stdout.write(json.dumps(_answer(line)) + "\n")
        sys.stdout.flush()


def main() -> None:
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
