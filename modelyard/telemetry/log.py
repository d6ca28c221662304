"""Structured logging on the standard `logging` module: text on a terminal, JSON lines elsewhere.

Structured fields travel as `record.fields` (a dict) and the request's id as `record.request_id`, so that any other
handler attached to a logger sees them too. `current_trace` holds the id; the HTTP middleware sets it once per request.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, TextIO

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator

from modelyard.core.events import CacheReuse
from modelyard.telemetry.history import RequestRecord
from modelyard.telemetry.masking import mask_secret_values, mask_secrets


class LogSettings(BaseModel):
    """Settings of the log, of request capture and of the request history."""

    model_config = ConfigDict(extra="forbid")

    level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        default="info", description="The least severe level that is logged."
    )
    format: Literal["auto", "human", "json"] = Field(
        default="auto",
        description="Text lines (human) or JSON lines (json); auto writes text on a terminal and JSON elsewhere.",
    )
    debug_dir: Path | None = Field(
        default=None, description='Folder for request capture, four files per request; --debug sets it to "debug".'
    )
    debug_max_requests: int = Field(
        default=200, gt=0, description="Requests kept in debug_dir; older ones are deleted."
    )
    debug_max_bytes: int = Field(
        default=256 * 1024**2, gt=0, description="Bytes kept in debug_dir; older files are deleted."
    )
    history_requests: int = Field(
        default=1000, gt=0, description="Finished requests that the admin API keeps in memory."
    )
    history_texts: bool = Field(
        default=False,
        description="Keep the texts of requests (prompt, output, response) in memory for the admin API. The admin API "
        "can switch it while the server runs.",
    )
    history_bytes: int = Field(
        default=64 * 1024**2, gt=0, description="Bytes of these texts in all; the oldest are dropped first."
    )

    @field_validator("level", mode="before")
    @classmethod
    def _normalize_level(cls, value: Any) -> Any:
        level = value.lower() if isinstance(value, str) else value
        return "warning" if level == "warn" else level


current_trace: Final[ContextVar[str]] = ContextVar("current_trace", default="")

request_logger: Final = logging.getLogger("modelyard.http")
# They log every request at "info" or "debug".
_NOISY = ("httpx", "httpcore", "httpx2", "httpcore2", "mcp", "asyncio", "multipart")
_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
_COLOURS = {"DEBUG": "\x1b[2m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[1;31m"}
_RESET = "\x1b[0m"
_encoder = msgspec.json.Encoder(enc_hook=str)


def setup(settings: LogSettings, stream: TextIO | None = None) -> logging.Handler:
    """Send the log lines of every library to `stream` (default: stderr), and nowhere else."""
    out = stream or sys.stderr
    on_terminal = out.isatty()
    as_text = settings.format == "human" or (settings.format == "auto" and on_terminal)
    handler = CoalescingHandler(out)
    handler.setFormatter(TextFormatter(colour=on_terminal) if as_text else JsonFormatter())
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in (*_NOISY, *_UVICORN):
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    for name in _UVICORN:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # No formatter here shows these, and looking them up takes as long as the rest of a record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    return handler


class CoalescingHandler(logging.StreamHandler[TextIO]):
    """Writes the lines of one iteration of the event loop together; without a running loop, and from "warning" on, at
    once. A write per request line is a system call per request, and lines that are formatted one after the other take
    a third of the time."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: list[str | RequestLogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # Nothing in a request's record changes, so it can be formatted later.
            self._lines.append(record if isinstance(record, RequestLogRecord) else self._line(record))
        except Exception:
            self.handleError(record)
            return
        if record.levelno >= logging.WARNING:
            self.flush()
        elif len(self._lines) == 1:
            try:
                asyncio.get_running_loop().call_soon(self.flush)
            except RuntimeError:  # no running loop
                self.flush()

    def flush(self) -> None:
        """Also called at exit, by `logging.shutdown`."""
        self.acquire()
        try:
            lines, self._lines = self._lines, []
            if lines:
                self.stream.write("".join([line if isinstance(line, str) else self._line(line) for line in lines]))
                self.stream.flush()
        except Exception:
            self.handleError(logging.makeLogRecord({"msg": "log lines could not be written"}))
        finally:
            self.release()

    def _line(self, record: logging.LogRecord) -> str:
        """It is kept in memory, too."""
        line = self.format(record)
        if not hasattr(record, "is_private"):
            recent_records.add(record, line if isinstance(self.formatter, JsonFormatter) else None)
        return line + self.terminator


class LogEntry(msgspec.Struct, gc=False):
    """`line` is the record as JSON. Few objects are kept: the memory of those that are not is used again at once, while
    it is in the CPU's caches."""

    created: float
    levelno: int
    line: str


class LogHistory:
    """The last records of this process, for `modelyard logs` and the admin API."""

    def __init__(self, size: int = 2000) -> None:
        self._entries: deque[LogEntry] = deque(maxlen=size)
        self._formatter = JsonFormatter()

    def add(self, record: logging.LogRecord, line: str | None = None) -> None:
        """`line`: the record as JSON, if it is known."""
        self._entries.append(LogEntry(record.created, record.levelno, line or self._formatter.format(record)))

    def read(self, since: float, level: int, request: str, limit: int) -> list[dict[str, Any]]:
        """The newest lines after the unix time `since`, oldest first; `request` is the end of a request's id."""
        found = [entry for entry in list(self._entries) if entry.created > since and entry.levelno >= level]
        found.sort(key=lambda entry: entry.created)  # request lines are added when they are written
        lines = [{"at": entry.created, **msgspec.json.decode(entry.line)} for entry in found if request in entry.line]
        if request:
            lines = [line for line in lines if line.get("request_id", "").endswith(request)]
        return lines[-limit:] if limit else []


def log_event(
    logger: logging.Logger, level: int, message: str, /, *, error: BaseException | None = None, **fields: Any
) -> None:
    """Log a message with structured fields. `error` adds its traceback."""
    if logger.isEnabledFor(level):
        logger.log(level, message, exc_info=error, extra={"fields": fields, "request_id": current_trace.get()})


def log_request(
    level: int,
    method: str,
    path: str,
    status: int,
    seconds: float,
    key: str,
    reuse: CacheReuse | None = None,
    error: str = "",
    records: Sequence[RequestRecord] = (),
) -> None:
    """Log one answered HTTP request; `records` are those of its generations. The first uncached token and message are
    logged only for a real cache miss."""
    if not request_logger.isEnabledFor(level):
        return
    fields: dict[str, Any] = {
        "method": method,
        "path": path,
        "status": status,
        "ms": round(seconds * 1e5) / 100,
        "key": key,
    }
    if records:
        first, output = records[0], sum(record.usage.output for record in records)
        fields |= {"model": first.model, "input_tokens": first.usage.prompt, "output_tokens": output}
        if first.timings.first_token is not None:
            fields["first_token_ms"] = round(first.timings.first_token * 1000, 1)
        if first.timings.decode and first.usage.output > 1:
            fields["tokens_per_s"] = round((first.usage.output - 1) / first.timings.decode, 1)
        fields["finish_reason"] = first.status
    if error:
        fields["error"] = error
    if reuse is not None:
        fields |= {"reused": reuse.reused, "evaluated": reuse.evaluated, "cause": reuse.cause}
        if reuse.message is not None:
            fields |= {"token": reuse.token, "message": reuse.message, "role": reuse.role}
    request_logger.handle(RequestLogRecord(level, fields))


class RequestLogRecord(logging.LogRecord):
    """The line of one answered request. Its fields are this server's own, so they contain no secrets."""

    def __init__(self, level: int, fields: dict[str, Any]) -> None:
        # As in LogRecord, which takes as long as the rest of the line to find out what is the same for all of them.
        now = time.time()
        self.__dict__ = {
            **_REQUEST_LINE,
            "levelno": level,
            "levelname": logging.getLevelName(level),
            "created": now,
            "msecs": int(now % 1 * 1000),
            "relativeCreated": (now - _STARTED) * 1000,
            "fields": fields,
            "request_id": current_trace.get(),
        }


_STARTED: Final = time.time()
_REQUEST_LINE: Final = {
    **logging.LogRecord(request_logger.name, logging.INFO, __file__, 0, "request", (), None, "log_request").__dict__,
    **dict.fromkeys(("thread", "threadName", "process", "processName")),  # as with `logging.logThreads` off
}


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "message", "request_id", …fields, "error"}`, one object per line."""

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        line: dict[str, Any] = {
            "time": f"{_utc(second)}.{int((record.created - second) * 1000):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.msg if isinstance(record, RequestLogRecord) else mask_secrets(record.getMessage()),
        }
        if request_id := _request_id(record):
            line["request_id"] = request_id
        fields = _fields(record)
        if line.keys().isdisjoint(fields):
            line |= fields
        else:
            line |= {name if name not in line else f"{name}_": value for name, value in fields.items()}
        if record.exc_info:
            line["error"] = mask_secrets(self.formatException(record.exc_info))
        elif record.exc_text:
            line["error"] = mask_secrets(record.exc_text)
        try:
            return _encoder.encode(line).decode()
        except (UnicodeEncodeError, TypeError):  # a lone surrogate or a dict with unusual keys: keep the line
            safe = {name: str(value).encode("utf-8", "backslashreplace").decode() for name, value in line.items()}
            return _encoder.encode(safe).decode()


recent_records: Final = LogHistory()


@lru_cache(maxsize=2)
def _utc(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class TextFormatter(logging.Formatter):
    """`12:30:01 INFO    [trace] message key=value`, in local time."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        request_id = _request_id(record)
        prefix = f"[{request_id}] " if request_id else ""
        fields = "".join(f" {name}={_format_value(value)}" for name, value in _fields(record).items())
        line = f"{clock} {record.levelname:<8}{prefix}{_escape(mask_secrets(record.getMessage()))}{fields}"
        if self._colour and (colour := _COLOURS.get(record.levelname)):
            line = f"{colour}{line}{_RESET}"
        error = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        return f"{line}\n{mask_secrets(error)}" if error else line


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", None) or {}
    if not fields or isinstance(record, RequestLogRecord):
        return fields
    texts = {name: str(value) for name, value in fields.items() if isinstance(value, BaseException | Path)}
    masked: dict[str, Any] = mask_secret_values(fields | texts)
    return masked


def _request_id(record: logging.LogRecord) -> str:
    """Other libraries' records carry no id; they are formatted in the context of the request that logs them."""
    request_id: str | None = getattr(record, "request_id", None)
    return current_trace.get() if request_id is None else request_id


def _format_value(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)


def _escape(text: str) -> str:
    """Escape control characters: a client's text must not forge a second line or colour the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def announce(host: str, port: int, tls: bool, models: list[str], workbench: bool = True, code: str = "") -> None:
    """Log the addresses of the API and of the workbench. The link with the one-time `code` makes its visitor the owner:
    it is written, and not among the lines that the admin API shows."""
    name = "localhost" if host in ("127.0.0.1", "::1", "localhost") else host
    url = f"{'https' if tls else 'http'}://{name}:{port}"
    logger = logging.getLogger("modelyard")
    log_event(logger, logging.INFO, f"listening on {url}", models=", ".join(models))
    if workbench:
        log_event(logger, logging.INFO, f"the workbench is at {url}/workbench")
    if code:
        link = f"{url}/workbench?code={code}"
        logger.info("open it as the owner, once and within an hour: %s", link, extra={"is_private": True})
