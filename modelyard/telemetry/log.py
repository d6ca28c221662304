"""Structured logs on the standard library: lines for people on a terminal, JSON lines for machines elsewhere.

Every line carries the id of the request it belongs to, from `current_trace`: set it once where a request enters.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache
from time import time
from types import TracebackType
from typing import Any, Final, TextIO

import msgspec

from modelyard.telemetry.settings import LogSettings

current_trace: Final[ContextVar[str]] = ContextVar("current_trace", default="")

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]

_CHATTY = ("httpx", "httpcore", "asyncio", "multipart")  # a line of theirs a request, at "info" or "debug"
_SERVER = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
_COLOURS = {"DEBUG": "\x1b[2m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[1;31m"}
_RESET = "\x1b[0m"
_encoder = msgspec.json.Encoder(enc_hook=str)
_NAMES = {number: name.lower() for name, number in logging.getLevelNamesMapping().items()}
# Where JSON lines without a traceback go at once: the library's record costs more than the line.
_direct: Gathered | None = None
_GATHER_S = 0.02


Line = dict[str, Any]
Facts = dict[str, Any] | Callable[[], dict[str, Any]]  # a function is asked when the line is made, which may be later
Note = tuple[float, str, str, str, str, Facts]  # what a line is made of: see `_line`


class Gathered:
    """A stream for JSON lines: those of one moment of a running loop are one write. Everything else is written at once.

    `write` belongs to the loop's thread or to a thread without a loop, as a stream's own does; a line of another
    thread goes out before those that still wait, which is no matter: each has its time.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._held: list[Note] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def gather(self, note: Note) -> None:
        """Its line is made when it is written: many in a row are quicker made than one at a time."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._stream.write(_json(_line(*note)) + "\n")
            return
        if not self._held or loop is not self._loop:  # an ended loop has taken its timer with it
            self._loop = loop
            loop.call_later(_GATHER_S, self.flush)
        self._held.append(note)

    def write(self, text: str) -> None:
        self.flush()
        self._stream.write(text)

    def flush(self) -> None:
        held, self._held = self._held, []
        if self._stream.closed:
            return
        if held:
            self._stream.write(_json_lines([_line(*note) for note in held]))
        self._stream.flush()


def setup(settings: LogSettings, stream: TextIO | None = None) -> logging.Handler:
    """Make `stream` (stderr if none is given) the only place where any library's log lines go."""
    out = stream or sys.stderr
    on_terminal = out.isatty()
    human = settings.format == "human" or (settings.format == "auto" and on_terminal)
    gathered = Gathered(out)
    handler = logging.StreamHandler(gathered)
    atexit.register(gathered.flush)
    handler.setFormatter(HumanLines(colour=on_terminal) if human else JsonLines())
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    root = logging.getLogger()
    root.handlers[:] = [handler]
    global _direct  # noqa: PLW0603  the process has one log, as the library's root logger is one
    _direct = None if human else gathered
    root.setLevel(level)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    for name in _SERVER:  # its own news («Started server process») say nothing that ours do not
        _hand_over(logging.getLogger(name), max(level, logging.WARNING))
    _skip_unused_facts()
    return handler


def _hand_over(logger: logging.Logger, level: int) -> None:
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(level)


def _skip_unused_facts() -> None:
    """No line shows them, and gathering them costs more than the rest of the record."""
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def event(
    logger: logging.Logger, level: int, message: str, /, *, error: BaseException | None = None, **fields: Any
) -> None:
    """Log a sentence with its facts apart. `error` adds the traceback; the caller's line number is not looked up."""
    line(logger, level, message, fields, error)


def line(logger: logging.Logger, level: int, message: str, fields: Facts, error: BaseException | None = None) -> None:
    """`event` for somebody who has the facts in a dictionary already, or can tell them soon."""
    if not logger.isEnabledFor(level):
        return
    if _direct is not None and error is None:
        note = time(), _NAMES[level], logger.name, message, current_trace.get(), fields
        _direct.gather(note) if level < logging.WARNING else _direct.write(_json(_line(*note)) + "\n")
        return
    exc_info: ExcInfo | None = (type(error), error, error.__traceback__) if error is not None else None
    record = logging.LogRecord(logger.name, level, "", 0, message, None, exc_info)
    record.fields = fields() if callable(fields) else fields
    logger.handle(record)


class JsonLines(logging.Formatter):
    """`{"time", "level", "logger", "message", "request_id", …fields, "error"}`, one object a line."""

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        line = _line(record.created, level, record.name, record.getMessage(), current_trace.get(), _fields(record))
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _json(line)


def _line(created: float, level: str, logger: str, message: str, trace: str, facts: Facts) -> Line:
    fields = facts() if callable(facts) else facts
    made: Line = {"time": _timestamp(created), "level": level, "logger": logger, "message": message}
    if trace:
        made["request_id"] = trace
    if len(joined := made | fields) == len(made) + len(fields):  # nearly always: no field has a name of ours
        return joined
    for name, value in fields.items():
        made[name if name not in made else f"{name}_"] = value
    return made


class HumanLines(logging.Formatter):
    """`12:30:01 INFO    [trace] message key=value`; colour only where a terminal shows it."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")  # people read local time
        trace = current_trace.get()
        facts = "".join(f" {name}={_shown(value)}" for name, value in _fields(record).items())
        line = f"{clock} {record.levelname:<8}{f'[{trace}] ' if trace else ''}{_one_line(record.getMessage())}{facts}"
        if self._colour and (colour := _COLOURS.get(record.levelname)):
            line = f"{colour}{line}{_RESET}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", None) or {}


def _json_lines(lines: list[Line]) -> str:
    try:
        return _encoder.encode_lines(lines).decode()
    except (UnicodeEncodeError, TypeError):  # one of them
        return "".join([_json(line) + "\n" for line in lines])


def _json(line: Line) -> str:
    try:
        return _encoder.encode(line).decode()
    except (UnicodeEncodeError, TypeError):  # a lone surrogate, or a dict with odd keys: the line matters more
        safe = {name: str(value).encode("utf-8", "backslashreplace").decode() for name, value in line.items()}
        return _encoder.encode(safe).decode()


_THOUSANDTHS = tuple(f".{ms:03d}Z" for ms in range(1000))


def _timestamp(created: float) -> str:
    second = int(created)
    return _second(second) + _THOUSANDTHS[int((created - second) * 1000)]


@lru_cache(maxsize=8)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _shown(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)


def _one_line(text: str) -> str:
    """A client's text in a message must not forge a second line, nor colour the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def announce(host: str, port: int, tls: bool, models: list[str]) -> None:
    """The first lines that people look for: where to point a client, and a browser."""
    name = "localhost" if host in ("127.0.0.1", "::1", "localhost") else host
    url = f"{'https' if tls else 'http'}://{name}:{port}"
    event(logging.getLogger("modelyard"), logging.INFO, f"listening on {url}", models=", ".join(models))
    event(logging.getLogger("modelyard"), logging.INFO, f"the workbench is at {url}/workbench")
