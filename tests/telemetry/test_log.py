from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from modelyard.core.events import CacheReuse
from modelyard.telemetry.log import (
    LogHistory,
    LogSettings,
    current_trace,
    log_event,
    log_request,
    recent_records,
    setup,
)

_log = logging.getLogger("modelyard.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    switches = logging.logThreads, logging.logProcesses, logging.logMultiprocessing
    token = current_trace.set("")
    yield
    current_trace.reset(token)
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.logThreads, logging.logProcesses, logging.logMultiprocessing = switches


def _json_log(level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    setup(LogSettings.model_validate({"level": level}), stream)
    return stream


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def _request(level: int = logging.INFO, reuse: CacheReuse | None = None) -> None:
    log_request(level, method="POST", path="/v1/messages", status=200, seconds=0.0123456, key="me", reuse=reuse)


# --- settings ---------------------------------------------------------------------------------------------------------


def test_levels_are_accepted_in_any_case() -> None:
    for value, level in (("INFO", "info"), ("warn", "warning"), ("Error", "error")):
        assert LogSettings.model_validate({"level": value}).level == level


def test_an_unknown_level_is_refused() -> None:
    for level in ("loud", 3, None):
        with pytest.raises(ValidationError):
            LogSettings.model_validate({"level": level})


# --- requests ---------------------------------------------------------------------------------------------------------


def test_any_handler_receives_a_record_for_every_request() -> None:
    records: list[logging.LogRecord] = []

    class Recording(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    _json_log()
    handler = Recording()
    logging.getLogger("modelyard.http").addHandler(handler)
    try:
        for trace in ("one", "two"):
            current_trace.set(trace)
            _request()
    finally:
        logging.getLogger("modelyard.http").removeHandler(handler)
    assert [(record.getMessage(), record.__dict__["request_id"]) for record in records] == [
        ("request", "one"),
        ("request", "two"),
    ]
    assert records[0].__dict__["fields"] == {
        "method": "POST",
        "path": "/v1/messages",
        "status": 200,
        "ms": 12.35,
        "key": "me",
    }


def test_a_request_line_shows_what_the_cache_held() -> None:
    stream = _json_log()
    _request(reuse=CacheReuse(90, 10, "none", 90))
    _request(reuse=CacheReuse(5, 95, "system_changed", 5, 0, "system"))
    hit, miss = _lines(stream)
    assert (hit["reused"], hit["evaluated"], hit["cause"]) == (90, 10, "none")
    assert "token" not in hit
    assert (miss["cause"], miss["token"], miss["message_"], miss["role"]) == ("system_changed", 5, 0, "system")


def test_a_request_below_the_level_is_not_logged() -> None:
    stream = _json_log()
    _request(logging.DEBUG)
    assert stream.getvalue() == ""


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_a_pipe_gets_json_lines_with_the_request_id_and_the_fields() -> None:
    stream = _json_log()
    current_trace.set("req1")
    log_event(_log, logging.INFO, "answered", status=200, seconds=0.5)
    (line,) = _lines(stream)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "modelyard.test",
        "message": "answered",
        "request_id": "req1",
        "status": 200,
        "seconds": 0.5,
    }


def test_a_line_outside_a_request_has_no_request_id() -> None:
    stream = _json_log()
    log_event(_log, logging.INFO, "started")
    assert "request_id" not in _lines(stream)[0]


def test_a_field_never_replaces_a_fixed_one() -> None:
    stream = _json_log()
    log_event(_log, logging.INFO, "answered", level="high", time=3)
    (line,) = _lines(stream)
    assert (line["level"], line["level_"], line["time_"]) == ("info", "high", 3)


def test_values_that_json_cannot_hold_never_lose_the_line() -> None:
    stream = _json_log()
    values = ["\ud800", object(), {(1, 2): 3}, b"\xff", float("nan")]
    for value in values:
        log_event(_log, logging.INFO, "kept", value=value)
    assert [line["message"] for line in _lines(stream)] == ["kept"] * len(values)


# --- text -------------------------------------------------------------------------------------------------------------


def test_a_terminal_gets_text_lines() -> None:
    stream = Terminal()
    setup(LogSettings(), stream)
    current_trace.set("req1")
    log_event(_log, logging.INFO, "answered", status=200, seconds=0.123456789, note="two words")
    assert stream.getvalue()[8:] == " INFO    [req1] answered status=200 seconds=0.123457 note='two words'\n"


def test_only_a_terminal_gets_colours() -> None:
    stream, pipe = Terminal(), io.StringIO()
    setup(LogSettings(), stream)
    log_event(_log, logging.ERROR, "broken")
    setup(LogSettings(format="human"), pipe)
    log_event(_log, logging.ERROR, "broken")
    assert stream.getvalue().startswith("\x1b[31m")
    assert "\x1b" not in pipe.getvalue()


def test_the_configured_format_overrides_the_terminal() -> None:
    stream = Terminal()
    setup(LogSettings(format="json"), stream)
    log_event(_log, logging.INFO, "hello")
    assert _lines(stream)[0]["message"] == "hello"


def test_client_text_cannot_forge_a_second_line() -> None:
    stream = io.StringIO()
    setup(LogSettings(format="human"), stream)
    log_event(_log, logging.INFO, "model é\nERROR forged \x1b[31m", name="a\nb\x1b")
    assert len(stream.getvalue().splitlines()) == 1
    assert "model é\\nERROR" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


# --- both -------------------------------------------------------------------------------------------------------------


def test_lines_below_the_level_are_dropped() -> None:
    stream = _json_log("warning")
    log_event(_log, logging.INFO, "quiet")
    log_event(_log, logging.WARNING, "loud")
    assert [line["message"] for line in _lines(stream)] == ["loud"]


def test_an_error_is_logged_with_its_traceback() -> None:
    error = ValueError("no such thing")
    stream = _json_log()
    log_event(_log, logging.ERROR, "failed", error=error)
    assert "ValueError: no such thing" in _lines(stream)[0]["error"]
    stream = io.StringIO()
    setup(LogSettings(format="human"), stream)
    log_event(_log, logging.ERROR, "failed", error=error)
    assert stream.getvalue().endswith("ValueError: no such thing\n")


def test_lines_of_uvicorn_and_other_libraries_take_the_same_path_once() -> None:
    uvicorn = logging.getLogger("uvicorn")
    uvicorn.addHandler(logging.StreamHandler(io.StringIO()))
    uvicorn.propagate = False
    stream = _json_log()
    current_trace.set("req1")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request of %d bytes", 7)
    assert uvicorn.handlers == []
    assert [(line["message"], line["request_id"]) for line in _lines(stream)] == [
        ("Invalid HTTP request of 7 bytes", "req1")
    ]


def test_noisy_libraries_log_nothing_below_a_warning() -> None:
    stream = _json_log("debug")
    for name in ("httpx", "uvicorn.error"):
        logging.getLogger(name).info("HTTP Request: POST …")
        logging.getLogger(name).warning("retrying")
    assert [line["level"] for line in _lines(stream)] == ["warning"] * 2


def test_a_second_setup_replaces_the_first() -> None:
    first = _json_log()
    second = _json_log()
    log_event(_log, logging.INFO, "once")
    assert first.getvalue() == ""
    assert len(_lines(second)) == 1


# --- writing ----------------------------------------------------------------------------------------------------------


class CountingStream(io.StringIO):
    writes = 0

    def write(self, text: str, /) -> int:
        self.writes += 1
        return super().write(text)


async def test_the_lines_of_one_loop_iteration_are_written_together() -> None:
    stream = CountingStream()
    setup(LogSettings(format="json"), stream)
    log = logging.getLogger("modelyard.test")
    for n in range(3):
        log.info("line %s", n)
    assert stream.writes == 0
    await asyncio.sleep(0)
    assert stream.writes == 1
    assert [line["message"] for line in _lines(stream)] == ["line 0", "line 1", "line 2"]


async def test_a_warning_is_written_at_once_and_after_the_lines_before_it() -> None:
    stream = CountingStream()
    setup(LogSettings(format="json"), stream)
    log = logging.getLogger("modelyard.test")
    log.info("first")
    log.warning("second")
    assert [line["message"] for line in _lines(stream)] == ["first", "second"]


def test_without_a_loop_each_line_is_written_at_once() -> None:
    stream = CountingStream()
    setup(LogSettings(format="json"), stream)
    logging.getLogger("modelyard.test").info("line")
    assert [line["message"] for line in _lines(stream)] == ["line"]


def test_a_closed_stream_does_not_stop_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    stream = CountingStream()
    handler = setup(LogSettings(format="json"), stream)
    stream.close()
    logging.getLogger("modelyard.test").info("line")
    assert "I/O operation on closed file" in capsys.readouterr().err
    logging.getLogger().removeHandler(handler)


# --- the last lines ---------------------------------------------------------------------------------------------------


def _record(level: int, message: str, at: float, request: str | None = None, **more: Any) -> logging.LogRecord:
    record = logging.makeLogRecord({"name": "m", "levelno": level, "levelname": "INFO", "msg": message, **more})
    record.created = at
    if request is not None:
        record.request_id = request
    return record


def test_the_last_lines_are_kept_and_selected_by_time_level_and_request():
    history = LogHistory(size=3)
    for number in range(5):
        history.add(_record(logging.INFO, f"line {number}", float(number), f"trace{number}"))
    everything = history.read(0, logging.DEBUG, "", 10)
    assert [line["message"] for line in everything] == ["line 2", "line 3", "line 4"]
    assert [line["at"] for line in history.read(3.0, logging.DEBUG, "", 10)] == [4.0]
    assert [line["request_id"] for line in history.read(0, logging.DEBUG, "ce3", 10)] == ["trace3"]
    assert history.read(0, logging.WARNING, "", 10) == []
    assert [line["at"] for line in history.read(0, logging.DEBUG, "", 1)] == [4.0], "the newest"
    assert history.read(0, logging.DEBUG, "", 0) == []


def test_a_kept_line_holds_no_objects_and_belongs_to_its_request():
    class Large:
        def __str__(self) -> str:
            return "large"

    history, large = LogHistory(), Large()
    alive = weakref.ref(large)
    token = current_trace.set("trace")
    try:
        raise ValueError("x" * 10)
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
        history.add(_record(logging.ERROR, "lost %s", 1.0, args=(large,), exc_info=info))
    finally:
        current_trace.reset(token)
    del large, info
    gc.collect()
    assert alive() is None
    (line,) = history.read(0, logging.DEBUG, "", 10)
    assert (line["message"], line["request_id"]) == ("lost large", "trace")
    assert "ValueError: xxxxxxxxxx" in line["error"]


def test_every_logged_line_is_kept():
    _json_log()
    before = time.time()
    log_event(_log, logging.INFO, "remember me", model="m")
    (line,) = [line for line in recent_records.read(before - 1, logging.DEBUG, "", 100) if line.get("model") == "m"]
    assert line["message"] == "remember me"
