"""The conversation loop of chat and run against a live server, in this process and on a pseudo-terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from modelyard.cli import app
from modelyard.cli.chat import ChatLoop, is_command, one_shot_parts
from modelyard.cli.chat_screen import ChatScreen, is_complete, unfolded
from modelyard.cli.conversation import Conversation
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event
from modelyard.core.request import Image, Text
from tests.cli.terminal import Terminal
from tests.e2e.helpers import wait_until
from tests.live_server import LiveServer, demo_config, live_server

SCRIPT: list[dict[str, Any]] = [
    {"when": "^think", "steps": [{"think": "Let me see."}, {"text": "Forty-two."}]},
    {"when": "^fail", "steps": [{"text": "Half an"}, {"fail": "out of [memory]"}]},
    {"when": "^odd", "steps": [{"text": ":smile: [red]x[/red] \x1b[2J end"}]},
    {"when": "^endless", "steps": [{"text": "so far"}, {"hang": True}]},
    {"steps": [{"text": "Hello there."}]},
]
PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 20


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    config = demo_config(SCRIPT)
    config["models"]["demo"]["modalities"] = ["text", "image"]
    with live_server(config) as running:
        yield running


class FakeScreen(ChatScreen):
    """A screen with prepared input; when `interrupt` is shown, it acts as Ctrl-C."""

    def __init__(self, *lines: str, colour: bool = False, interrupt: str | None = None) -> None:
        self.paper, self.notes = io.StringIO(), io.StringIO()
        super().__init__(
            Console(file=self.paper, force_terminal=colour, color_system="standard" if colour else None),
            Console(file=self.notes, width=200),
        )
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

    @property
    def told(self) -> str:
        return self.notes.getvalue()


def talk(server: LiveServer, *lines: str, **screen: Any) -> tuple[FakeScreen, Conversation, int]:
    shown, conversation = FakeScreen(*lines, **screen), Conversation(server.url, "demo")
    code = ChatLoop(conversation, shown).run()
    return shown, conversation, code


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(m.role, "".join(p.text for p in m.parts if isinstance(p, Text))) for m in conversation.messages]


# --- replies ----------------------------------------------------------------------------------------------------------


def test_a_reply_is_shown_and_nothing_else_goes_to_the_output(server: LiveServer):
    screen, conversation, code = talk(server, "hi")
    assert (screen.text, screen.told, code) == ("Hello there.\n", "", 0)
    assert turns(conversation) == [("user", "hi"), ("assistant", "Hello there.")]


def test_verbose_tells_tokens_times_and_speed(server: LiveServer):
    screen = FakeScreen("hi")
    ChatLoop(Conversation(server.url, "demo"), screen, verbose=True).run()
    assert "tokens in" in screen.told
    assert "s in all; ended by end" in screen.told
    assert screen.text == "Hello there.\n"


def test_the_conversation_grows_and_empty_lines_are_skipped(server: LiveServer):
    _, conversation, _ = talk(server, "hi", "", "  ", "again")
    assert [role for role, _ in turns(conversation)] == ["user", "assistant"] * 2


def test_reasoning_is_dim_on_a_terminal_and_left_out_of_a_pipe(server: LiveServer):
    screen, _, _ = talk(server, "think", colour=True)
    assert "\x1b[2;3mLet me see." in screen.text
    assert screen.text.endswith("\nForty-two.\n")
    assert talk(server, "think")[0].text == "Forty-two.\n"
    assert "Let me see." in talk(server, "/think show", "think")[0].text


def test_a_call_is_shown_with_its_arguments():
    screen = FakeScreen()
    events = (BlockStart(0, "text"), BlockDelta(0, "I look."), BlockEnd(0), BlockStart(1, "tool_call", "c1", "see"))
    for event in events:
        screen.show(event)
    screen.show(BlockDelta(1, '{"at": "Rome"}'))
    assert screen.text == 'I look.\ncalls see {"at": "Rome"}'


def test_escape_sequences_of_the_model_are_not_sent_to_the_terminal(server: LiveServer):
    assert ":smile: [red]x[/red] ␛[2J end\n" in talk(server, "odd", colour=True)[0].text
    assert talk(server, "odd")[0].text == ":smile: [red]x[/red] \x1b[2J end\n", "a pipe gets the text as it is"


def test_a_failure_is_shown_and_its_question_is_dropped(server: LiveServer):
    screen, conversation, code = talk(server, "fail", "hi")
    assert "error " in screen.told
    assert "out of [memory]" in screen.told
    assert turns(conversation) == [("user", "hi"), ("assistant", "Hello there.")]
    assert code == 1, "lines of a pipe: a script must notice"


def test_an_interrupted_reply_is_kept(server: LiveServer):
    screen, conversation, _ = talk(server, "endless", interrupt="so far")
    assert (screen.text, screen.told) == ("so far\n", "stopped\n")
    assert turns(conversation) == [("user", "endless"), ("assistant", "so far")]
    wait_until(lambda: server.status("demo").running == 0, "the server lets go")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://[::1"])
def test_an_invalid_url_is_one_sentence(url: str):
    screen = FakeScreen("hi")
    ChatLoop(Conversation(url, "demo"), screen).run()
    assert url in screen.told
    assert screen.told.count("\n") == 1


# --- commands ---------------------------------------------------------------------------------------------------------


def test_help_lists_every_command(server: LiveServer):
    told = talk(server, "/help")[0].told
    assert all(f"/{name}" in told for name in ("clear", "system", "set", "image", "think", "retry", "save", "bye"))


def test_settings_reach_the_request(server: LiveServer):
    lines = ("/set temperature 0.25", "/set stop=END", "/system Be brief.", "/think off", "hi")
    request = talk(server, *lines)[1].request()
    assert (request.sampling.temperature, request.stop, request.reasoning.enabled) == (0.25, ("END",), False)
    assert request.messages[0].role == "system"
    undone = talk(server, *lines, "/set temperature", "/system none", "/think auto")[1].request()
    assert (undone.sampling.temperature, undone.reasoning.enabled) == (None, None)
    assert undone.messages[0].role == "user"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/set temprature 1", "Did you mean 'temperature'?"),
        ("/set top_p 7", "top_p must be at most 1"),
        ("/image nowhere.png", "cannot read nowhere.png"),
        ("/image", "/image takes the path"),
        ("/load nowhere.json", "cannot read nowhere.json"),
        ("/sett", "there is no command /sett"),
        ("/think hard", "/think takes on, off or auto"),
        ("/retry", "nothing to repeat"),
        ("/model", "model: demo"),
        ("/clear", "the conversation is empty"),
    ],
)
def test_a_command_answers_in_one_sentence(server: LiveServer, line: str, told: str):
    screen = talk(server, line)[0]
    assert told in screen.told
    assert screen.told.count("\n") == 1


def test_a_conversation_is_saved_and_continued(server: LiveServer, tmp_path: Path):
    file = tmp_path / "talk.json"
    talk(server, "/set seed 7", "hi", f"/save {file}")
    _, conversation, _ = talk(server, f"/load {file}", "again")
    assert [text for _, text in turns(conversation)] == ["hi", "Hello there.", "again", "Hello there."]
    assert conversation.request().sampling.seed == 7
    file.write_text('{"messages": 1}')
    assert "is not a saved conversation" in talk(server, f"/load {file}")[0].told


def test_retry_asks_the_last_question_again(server: LiveServer):
    screen, conversation, _ = talk(server, "think", "/retry")
    assert screen.text == "Forty-two.\nForty-two.\n"
    assert len(conversation.messages) == 2


def test_another_model_continues_the_conversation(server: LiveServer):
    _, conversation, _ = talk(server, "hi", "/model some-haiku", "again")
    assert conversation.model == "some-haiku"
    assert len(conversation.messages) == 4


def test_a_message_may_begin_with_a_path():
    assert is_command("/help")
    assert is_command("  /set temperature 1")
    assert not is_command("/etc/hosts is a file")
    assert not is_command("/* a comment */\nof two lines")


# --- several lines, images, pipes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "complete", "sent"),
    [
        ("hi", True, "hi"),
        ("first\\", False, ""),
        ("first\\\nsecond", True, "first\nsecond"),
        ('"""', False, ""),
        ('"""one\ntwo', False, ""),
        ('"""one\ntwo"""', True, "one\ntwo"),
        ('"""\none\n"""', True, "one"),
    ],
)
def test_several_lines_are_one_message(typed: str, complete: bool, sent: str):
    assert is_complete(typed) is complete
    assert not complete or unfolded(typed) == sent


def test_images_are_sent_by_path_by_command_and_by_pipe(server: LiveServer, tmp_path: Path):
    file = tmp_path / "a photo.png"
    file.write_bytes(PNG)
    for lines in ((f"/image {file}", "what is it?"), (f'what is it? "{file}"',)):
        screen, conversation, _ = talk(server, *lines)
        parts = conversation.messages[0].parts if conversation.messages else ()
        assert [type(part) for part in parts] == [Image, Text], screen.told
        assert parts[1] == Text("what is it?")
    escaped = str(file).replace(" ", "\\ ")
    for parts in (one_shot_parts(f"what? {escaped}", b"", ()), one_shot_parts("what?", PNG, ())):
        assert [type(part) for part in parts] == [Image, Text]
    assert one_shot_parts("see missing.png", b"", ()) == (Text("see missing.png"),)


def test_a_pipe_is_added_to_the_prompt():
    assert one_shot_parts("sum up", b"a\nb\n", ()) == (Text("sum up"), Text("\n\na\nb"))
    assert one_shot_parts("", b"a\xff\n", ()) == (Text("a�"),)
    assert one_shot_parts("", b" \n", ()) == ()


# --- the command ------------------------------------------------------------------------------------------------------


def test_without_a_server_the_chat_ends_at_once():
    shown = CliRunner().invoke(app.app, ["chat", "--url", "http://127.0.0.1:9"])
    assert shown.exit_code == 1
    assert shown.stderr.startswith("error no server answers at http://127.0.0.1:9")
    assert shown.stderr.count("\n") == 1


def test_an_unknown_model_shows_the_error_of_the_server():
    with live_server({"models": {"solo": {"backend": "fake"}}}) as server:
        shown = CliRunner().invoke(app.app, ["chat", "nobody", "--url", server.url], input="hi\n")
    assert "The model 'nobody' does not exist here. Models: solo." in shown.stderr
    assert shown.exit_code == 1


@pytest.mark.parametrize("option", ["temperature", "temperatur=1", "temperature=hot"])
def test_a_wrong_parameter_is_a_usage_error(option: str):
    shown = CliRunner().invoke(app.app, ["chat", "--set", option])
    assert (shown.exit_code, shown.stderr.count("\n")) == (2, 1)


def test_a_terminal_edits_lines_and_ctrl_c_stops_a_reply_only(server: LiveServer, tmp_path: Path):
    with Terminal("chat", "--url", server.url, MODELYARD_CACHE=str(tmp_path)) as terminal:
        terminal.wait_for("› ")
        terminal.type("thonk\x7f\x7f\x7fink\r")
        terminal.wait_for("\x1b[2;3mLet me see.")
        terminal.wait_for("Forty-two.")
        terminal.wait_for("› ")
        terminal.type("endless\r")
        terminal.wait_for("so far")
        terminal.type("\x03")
        terminal.wait_for("stopped")
        wait_until(lambda: server.status("demo").running == 0, "the server lets go")
        terminal.wait_for("› ")
        terminal.type("half a line\x03")
        terminal.wait_for("Ctrl-D or /bye ends the chat")
        terminal.wait_for("› ")
        terminal.type('"""one\rtwo"""\r')
        terminal.wait_for("Hello there.")
        terminal.wait_for("› ")
        terminal.type("/show\r")
        terminal.wait_for("one")
        terminal.wait_for("two")
        terminal.wait_for("› ")
        terminal.type("\x04")
        assert terminal.wait() == 0
    history = tmp_path / "chat_history"
    assert "+think" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_every_line_of_a_pipe_is_a_message(server: LiveServer):
    shown = CliRunner().invoke(app.app, ["chat", "--url", server.url], input="hi\nthink\n")
    assert (shown.exit_code, shown.stdout, shown.stderr) == (0, "Hello there.\nForty-two.\n", "")


@pytest.mark.parametrize("written", ['"""\nhi\nthink\n"""\n', "hi\\\nthink\n", '"""hi\nthink'])
def test_several_lines_of_a_pipe_are_one_message_if_they_are_marked(written: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(written))
    screen = ChatScreen(Console(), Console())
    assert (screen.ask(), screen.ask()) == ("hi\nthink", None)
