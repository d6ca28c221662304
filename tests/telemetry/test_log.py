from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from modelyard.telemetry.log import Gathered, Note, current_trace, event, setup
from modelyard.telemetry.log import line as log_line
from modelyard.telemetry.settings import LogSettings


@pytest.mark.parametrize(("written", "level"), [("INFO", "info"), ("warn", "warning"), ("Error", "error")])
def test_levels_are_understood_in_any_case(written: str, level: str) -> None:
    assert LogSettings.model_validate({"level": written}).level == level


@pytest.mark.parametrize("level", ["loud", 3, None])
def test_an_unknown_level_is_refused(level: object) -> None:
    with pytest.raises(ValidationError):
        LogSettings.model_validate({"level": level})


_log = logging.getLogger("modelyard.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _unchanged_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("modelyard.telemetry.log._direct", None)
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


def test_a_pipe_gets_json_lines_with_the_request_id_and_the_fields() -> None:
    stream = _json_log()
    current_trace.set("req1")
    event(_log, logging.INFO, "answered", status=200, seconds=0.5)
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "modelyard.test",
        "message": "answered",
        "request_id": "req1",
        "status": 200,
        "seconds": 0.5,
    }


def test_a_line_outside_any_request_has_no_request_id() -> None:
    stream = _json_log()
    event(_log, logging.INFO, "started")
    assert "request_id" not in json.loads(stream.getvalue())


def test_a_field_never_hides_a_fixed_one() -> None:
    stream = _json_log()
    event(_log, logging.INFO, "answered", level="high", time=3)
    line = json.loads(stream.getvalue())
    assert (line["level"], line["level_"], line["time_"]) == ("info", "high", 3)


def test_a_terminal_gets_lines_for_people() -> None:
    stream = Terminal()
    setup(LogSettings(), stream)
    current_trace.set("req1")
    event(_log, logging.INFO, "answered", status=200, seconds=0.123456789, note="two words")
    assert stream.getvalue()[8:] == " INFO    [req1] answered status=200 seconds=0.123457 note='two words'\n"


def test_only_a_terminal_gets_colours() -> None:
    stream, plain = Terminal(), io.StringIO()
    setup(LogSettings(), stream)
    event(_log, logging.ERROR, "broken")
    setup(LogSettings(format="human"), plain)
    event(_log, logging.ERROR, "broken")
    assert stream.getvalue().startswith("\x1b[31m")
    assert "\x1b" not in plain.getvalue()


def test_the_settings_overrule_the_terminal() -> None:
    stream = Terminal()
    setup(LogSettings(format="json"), stream)
    event(_log, logging.INFO, "hello")
    assert json.loads(stream.getvalue())["message"] == "hello"


def test_what_a_client_wrote_cannot_forge_a_second_line() -> None:
    stream = io.StringIO()
    setup(LogSettings(format="human"), stream)
    event(_log, logging.INFO, "model é\nERROR forged \x1b[31m", name="a\nb\x1b")
    assert len(stream.getvalue().splitlines()) == 1
    assert "model é\\nERROR" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_less_severe_lines_are_left_out() -> None:
    stream = _json_log("warning")
    event(_log, logging.INFO, "quiet")
    event(_log, logging.WARNING, "loud")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["loud"]


def test_an_error_brings_its_traceback() -> None:
    stream = _json_log()
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        event(_log, logging.ERROR, "failed", error=error)
    assert "ValueError: no such thing" in json.loads(stream.getvalue())["error"]
    stream = io.StringIO()
    setup(LogSettings(format="human"), stream)
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        event(_log, logging.ERROR, "failed", error=error)
    assert stream.getvalue().endswith("ValueError: no such thing\n")


@pytest.mark.parametrize("odd", ["\ud800", object(), {(1, 2): 3}, b"\xff", float("nan")])
def test_an_odd_field_never_costs_the_line(odd: object) -> None:
    stream = _json_log()
    event(_log, logging.INFO, "kept", odd=odd)
    assert json.loads(stream.getvalue())["message"] == "kept"


def test_uvicorns_lines_and_any_librarys_come_the_same_way_once() -> None:
    uvicorn = logging.getLogger("uvicorn")
    uvicorn.addHandler(logging.StreamHandler(io.StringIO()))
    uvicorn.propagate = False
    stream = _json_log()
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request of %d bytes", 7)
    assert uvicorn.handlers == []
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert messages == ["Invalid HTTP request of 7 bytes"]


@pytest.mark.parametrize("name", ["httpx", "uvicorn.error"])
def test_chatty_libraries_are_quiet_below_a_warning(name: str) -> None:
    stream = _json_log("debug")
    logging.getLogger(name).info("HTTP Request: POST …")
    logging.getLogger(name).warning("retrying")
    assert len(stream.getvalue().splitlines()) == 1


def test_a_second_setup_replaces_the_first() -> None:
    first = _json_log()
    second = _json_log()
    event(_log, logging.INFO, "once")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


# --- gathering --------------------------------------------------------------------------------------------------------


HEAD = '"time":"1970-01-01T00:00:00.000Z","level":"info","logger":"l","message":"m",'


def note(**fields: Any) -> Note:
    return 0.0, "info", "l", "m", "", fields


def line(fields: str) -> str:
    return "{" + HEAD + fields + "}\n"


class Counting(io.StringIO):
    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)


async def test_lines_of_one_moment_are_one_write() -> None:
    stream = Counting()
    lines = Gathered(stream)
    for number in range(5):
        lines.gather(note(n=number))
    assert stream.writes == 0
    lines.flush()
    assert stream.writes == 1
    assert stream.getvalue() == "".join(line(f'"n":{number}') for number in range(5))


async def test_a_line_that_is_no_unicode_spoils_none_beside_it() -> None:
    stream = Counting()
    lines = Gathered(stream)
    for said in ("good", "\ud800", "fine"):
        lines.gather(note(said=said))
    lines.flush()
    assert stream.getvalue() == line('"said":"good"') + line('"said":"\\\\ud800"') + line('"said":"fine"')


async def test_what_waits_is_written_soon_without_anybody_asking() -> None:
    class Heard(Counting):
        done = asyncio.Event()

        def flush(self) -> None:
            self.done.set()

    stream = Heard()
    Gathered(stream).gather(note(news=True))
    await asyncio.wait_for(stream.done.wait(), 60)
    assert stream.getvalue() == line('"news":true')


async def test_a_warning_goes_out_at_once_and_after_what_came_before_it() -> None:
    stream = Counting()
    lines = Gathered(stream)
    lines.gather(note(first=1))
    lines.write("warning\n")
    assert stream.getvalue() == line('"first":1') + "warning\n"


def test_without_a_loop_nothing_waits() -> None:
    stream = Counting()
    Gathered(stream).gather(note(at="once"))
    assert stream.getvalue() == line('"at":"once"')


def test_lines_that_an_ended_loop_left_behind_are_not_lost() -> None:
    stream = Counting()
    lines = Gathered(stream)

    async def say(word: str) -> None:
        lines.gather(note(word=word))

    asyncio.run(say("one"))
    asyncio.run(say("two"))
    lines.flush()
    assert stream.getvalue() == line('"word":"one"') + line('"word":"two"')


def test_a_closed_stream_is_left_alone() -> None:
    stream = Counting()
    lines = Gathered(stream)
    stream.close()
    lines.flush()


async def test_a_line_that_waits_keeps_the_request_that_it_was_said_in() -> None:
    stream = io.StringIO()
    handler = setup(LogSettings(format="json"), stream)
    for trace in ("one", "two", ""):
        current_trace.set(trace)
        event(logging.getLogger("modelyard.test"), logging.INFO, "said")
    handler.flush()
    assert [json.loads(each).get("request_id") for each in stream.getvalue().splitlines()] == ["one", "two", None]


def test_facts_that_are_told_when_asked_are_in_the_line() -> None:
    stream = _json_log()
    log_line(_log, logging.INFO, "said", lambda: {"n": 1})
    assert json.loads(stream.getvalue())["n"] == 1
    plain = io.StringIO()
    setup(LogSettings(format="human"), plain)
    log_line(_log, logging.INFO, "said", lambda: {"n": 1})
    assert plain.getvalue().endswith("said n=1\n")
