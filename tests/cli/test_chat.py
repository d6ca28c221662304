"""The terminal chat against a live server, in this process and on a pseudo-terminal."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from modelyard.cli.chat import ChatScreen, ChatSession
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event
from modelyard.core.request import Message, Text
from tests import cli_process
from tests.e2e.helpers import wait_until
from tests.live_server import LiveServer, demo_config, live_server

SCRIPT: list[dict[str, Any]] = [
    {"when": "^think", "steps": [{"think": "Let me see."}, {"text": "Forty-two."}]},
    {"when": "^fail", "steps": [{"text": "Half an"}, {"fail": "out of [memory]"}]},
    {"when": "^odd", "steps": [{"text": ":smile: [red]x[/red] \x1b[2J end"}]},
    {"when": "^endless", "steps": [{"text": "so far"}, {"hang": True}]},
    {"steps": [{"text": "Hello there."}]},
]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(demo_config(SCRIPT)) as running:
        yield running


class FakeScreen(ChatScreen):
    """A screen with prepared input; when `interrupt` is shown, it acts as Ctrl-C."""

    def __init__(self, *lines: str, colour: bool = False, interrupt: str | None = None) -> None:
        self.paper = io.StringIO()
        super().__init__(Console(file=self.paper, force_terminal=colour, color_system="standard" if colour else None))
        self._lines, self._interrupt = list(lines), interrupt

    def ask(self) -> str | None:
        return self._lines.pop(0) if self._lines else None

    def show(self, event: Event) -> None:
        super().show(event)
        if self._interrupt is not None and self._interrupt in self.text:
            raise KeyboardInterrupt

    @property
    def text(self) -> str:
        return self.paper.getvalue()


def turns(session: ChatSession) -> list[tuple[str, str]]:
    return [(m.role, "".join(p.text for p in m.parts if isinstance(p, Text))) for m in session.messages]


def test_a_reply_is_shown_with_its_usage(server: LiveServer):
    screen, session = FakeScreen("hi"), ChatSession(server.url, "demo")
    session.run(screen)
    assert screen.text.startswith("Hello there.\n")
    assert "tokens, end" in screen.text
    assert turns(session) == [("user", "hi"), ("assistant", "Hello there.")]


def test_the_conversation_grows_and_empty_lines_are_skipped(server: LiveServer):
    session = ChatSession(server.url, "demo", system="Be brief.")
    session.run(FakeScreen("hi", "", "  ", "again"))
    assert [role for role, _ in turns(session)] == ["system", "user", "assistant", "user", "assistant"]


def test_the_default_is_the_first_model_of_the_server(server: LiveServer):
    session = ChatSession(server.url + "/")
    session.run(FakeScreen("hi"))
    assert turns(session)[-1] == ("assistant", "Hello there.")


def test_reasoning_is_dim_and_the_reply_is_not(server: LiveServer):
    screen = FakeScreen("think", colour=True)
    ChatSession(server.url, "demo").run(screen)
    assert "\x1b[2;3mLet me see." in screen.text
    assert "\nForty-two." in screen.text


def test_a_call_is_shown_with_its_arguments():
    screen = FakeScreen()
    for event in (
        BlockStart(0, "text"),
        BlockDelta(0, "I look."),
        BlockEnd(0),
        BlockStart(1, "tool_call", "c1", "see"),
    ):
        screen.show(event)
    screen.show(BlockDelta(1, '{"at": "Rome"}'))
    assert screen.text == 'I look.\ncalls see {"at": "Rome"}'


def test_escape_sequences_of_the_model_are_not_sent_to_the_terminal(server: LiveServer):
    screen = FakeScreen("odd")
    ChatSession(server.url, "demo").run(screen)
    assert screen.text.startswith(":smile: [red]x[/red] ␛[2J end\n")


def test_a_failure_is_shown_and_its_question_is_dropped(server: LiveServer):
    screen, session = FakeScreen("fail", "hi"), ChatSession(server.url, "demo")
    session.run(screen)
    assert "out of [memory]" in screen.text
    assert turns(session) == [("user", "hi"), ("assistant", "Hello there.")]


def test_an_unknown_model_shows_the_error_of_the_server():
    with live_server({"models": {"solo": {"backend": "fake"}}}) as server:
        screen = FakeScreen("hi")
        ChatSession(server.url, "nobody").run(screen)
    assert "The model 'nobody' does not exist here. Models: solo." in screen.text


def test_an_interrupted_reply_is_kept(server: LiveServer):
    screen, session = FakeScreen("endless", interrupt="so far"), ChatSession(server.url, "demo")
    session.run(screen)
    assert screen.text == "so far\nstopped\n"
    assert turns(session) == [("user", "endless"), ("assistant", "so far")]
    wait_until(lambda: server.status("demo").running == 0, "the server lets go")


def test_an_unreachable_server_is_a_helpful_sentence():
    screen, session = FakeScreen("hi"), ChatSession("http://127.0.0.1:9", "demo")
    session.run(screen)
    assert screen.text == "\nno server answers at http://127.0.0.1:9; start one with: modelyard serve\n"
    assert session.messages == []


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://[::1"])
def test_an_invalid_url_is_one_sentence(url: str):
    screen = FakeScreen("hi")
    ChatSession(url, "demo").run(screen)
    assert url in screen.text
    assert screen.text.count("\n") == 2


def test_a_server_without_models_asks_for_a_name(server: LiveServer):
    screen = FakeScreen("hi")
    ChatSession(server.url + "/health", None).run(screen)
    assert "there is no /health/v1/models here" in screen.text


def test_messages_start_with_the_system_prompt():
    assert ChatSession("http://x", "m", system="Be brief.").messages == [Message("system", (Text("Be brief."),))]


# --- on a terminal ----------------------------------------------------------------------------------------------------

# The new session has no terminal until a process claims one; only then does Ctrl-C reach it as a signal.
_CLAIM = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"

_RETRY_AFTER_S = 20.0


class Terminal:
    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 100))
        argv = [sys.executable, "-c", _CLAIM, *cli_process.MODELYARD, *arguments]
        env = cli_process.environment(TERM="xterm-256color")
        self.process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
        os.close(theirs)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, expected: str) -> None:
        """Wait for this text and drop everything before it."""
        assert self._appears(expected, cli_process.DEADLINE), f"it never showed {expected!r}, only {self.text!r}"
        self.text = self.text.partition(expected)[2]

    def interrupt_until(self, expected: str) -> None:
        """Send Ctrl-C, and once more if nothing happens: Python handles a signal that arrives just before it waits for
        the network only when data arrives."""
        self.type("\x03")
        if not self._appears(expected, _RETRY_AFTER_S):
            self.type("\x03")
        self.wait_for(expected)

    def _appears(self, expected: str, silence_s: float) -> bool:
        while expected not in self.text:
            readable, _, _ = select.select([self._ours], [], [], silence_s)
            if not readable:
                return False
            self.text += os.read(self._ours, 65536).decode(errors="replace")
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_ctrl_c_stops_a_reply_and_ctrl_d_the_chat(server: LiveServer):
    terminal = Terminal("chat", "demo", "--url", server.url)
    try:
        terminal.wait_for("› ")
        terminal.type("think\r")
        terminal.wait_for("\x1b[2;3mLet me see.")
        terminal.wait_for("Forty-two.")
        terminal.wait_for("› ")
        terminal.type("endless\r")
        terminal.wait_for("so far")
        terminal.interrupt_until("stopped")
        wait_until(lambda: server.status("demo").running == 0, "the server lets go")
        terminal.wait_for("› ")
        terminal.type("\x04")
        assert terminal.process.wait(cli_process.DEADLINE) == 0
    finally:
        terminal.close()


def test_the_chat_works_with_pipes(server: LiveServer):
    ended = subprocess.run(
        [*cli_process.MODELYARD, "chat", "--url", server.url],
        input="hi\nthink\n",
        env=cli_process.environment(),
        capture_output=True,
        text=True,
        timeout=cli_process.DEADLINE,
        check=False,
    )
    assert ended.returncode == 0
    assert ended.stdout.index("Hello there.") < ended.stdout.index("Let me see.") < ended.stdout.index("Forty-two.")
    assert "\x1b" not in ended.stdout
    assert ended.stderr == ""
