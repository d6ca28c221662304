"""The terminal of a chat: line editing with history, replies as they arrive, a spinner while nothing has."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.status import Status
from rich.text import Text as Styled

from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.core.events import BlockDelta, BlockKind, BlockStart, Event

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

_STYLES: dict[BlockKind, str] = {"text": "", "thinking": "dim italic", "tool_call": "yellow"}
# Control characters of a model's text must not reach the terminal: they could rewrite what it shows.
_SHOWN = {code: "␛" if code == 0x1B else "�" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


class ChatScreen:
    """Shows replies on `out` and everything else on `err`, so that a pipe gets the replies only.

    `show_thinking`: reasoning is shown dim. By default it is on a terminal, and not in a pipe.
    """

    def __init__(self, out: Console, err: Console, *, show_thinking: bool | None = None) -> None:
        self.out, self.err = out, err
        self.show_thinking = out.is_terminal if show_thinking is None else show_thinking
        self._kind: BlockKind = "text"
        self._at_start = True  # of a line
        self._status: Status | None = None

    # --- replies ------------------------------------------------------------------------------------------------------

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """A spinner on a terminal until the first piece of the reply is shown."""
        if self.err.is_terminal and self.out.is_terminal:
            self._status = self.err.status(f"[dim]{text}[/dim]", spinner="dots")
            self._status.start()
        try:
            yield
        finally:
            self._stop_waiting()

    def update_waiting(self, text: str) -> None:
        if self._status is not None:
            self._status.update(f"[dim]{text}[/dim]")

    def _stop_waiting(self) -> None:
        status, self._status = self._status, None
        if status is not None:
            status.stop()

    def show(self, event: Event) -> None:
        if isinstance(event, BlockStart):
            self._kind = event.kind
            if self._is_shown():
                self.end_line()
            if event.kind == "tool_call":
                self._write(f"calls {event.name} ")
        elif isinstance(event, BlockDelta) and self._is_shown():
            self._write(event.text)

    def _is_shown(self) -> bool:
        return self._kind != "thinking" or self.show_thinking

    def _write(self, text: str) -> None:
        """Print the model's text literally: no markup, no emoji codes, no terminal escapes."""
        if not text:
            return
        self._stop_waiting()
        self._at_start = text.endswith("\n")
        if self.out.is_terminal:
            self.out.print(Styled(text.translate(_SHOWN), _STYLES[self._kind]), end="", soft_wrap=True)
        else:
            self._write_plain(text)

    def _write_plain(self, text: str) -> None:
        try:
            self.out.file.write(text)
            self.out.file.flush()
        except BrokenPipeError:
            raise  # the reader has enough
        except OSError as error:
            raise Unavailable(f"the reply cannot be written: {error.strerror}") from None

    def end_line(self) -> None:
        """Start a new line if the last one has text."""
        is_open, self._at_start = not self._at_start, True
        if is_open:
            self._write_plain("\n")

    # --- everything else ----------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        self.end_line()
        self.err.print(Styled(text.translate(_SHOWN), "dim"), soft_wrap=True)

    def show_error(self, error: ModelyardError) -> None:
        with suppress(ModelyardError):  # the output may be what failed
            self.end_line()
        self.err.print(Styled("error ", "red") + Styled(error.message.translate(_SHOWN)), soft_wrap=True)

    def rows(self, rows: Iterable[tuple[str, str]]) -> None:
        found = list(rows)
        width = max((len(label) for label, _ in found), default=0)
        for label, text in found:
            self.err.print(Styled(f"  {label:<{width}}  ", "bold") + Styled(text.translate(_SHOWN)), soft_wrap=True)

    def ask(self) -> str | None:
        """The next message, None at the end of the input. Here: a line of a pipe, or several as on a terminal."""
        if sys.stdin is None or not (text := sys.stdin.readline()):
            return None
        while not is_complete(text := text.removesuffix("\n")) and (line := sys.stdin.readline()):
            text += f"\n{line}"
        return unfolded(text)


class TerminalScreen(ChatScreen):
    """Line editing: Alt-Enter and a backslash at the end start a new line, as does an open `\"""`; a pasted text keeps
    its lines. The arrow keys and Ctrl-R find earlier messages, Tab completes commands."""

    def __init__(self, out: Console, err: Console, history: Path, commands: dict[str, Any], **more: Any) -> None:
        super().__init__(out, err, **more)
        self._session = _prompt_session(out, history, commands)

    def ask(self) -> str | None:
        from prompt_toolkit.formatted_text import FormattedText

        while True:
            try:
                text = self._session.prompt(FormattedText([("bold ansicyan", "› ")]))
            except KeyboardInterrupt:
                self.note("Ctrl-D or /bye ends the chat")
                continue
            except EOFError:
                return None
            return unfolded(text)


def unfolded(text: str) -> str:
    """A typed message without the marks that continue lines."""
    stripped = text.strip()
    if stripped.startswith('"""'):
        return stripped.removeprefix('"""').removesuffix('"""').strip("\n")
    return text.replace("\\\n", "\n")


def is_complete(text: str) -> bool:
    """Whether Enter sends the text; otherwise it starts a new line."""
    stripped = text.strip()
    if stripped.startswith('"""'):
        return len(stripped) >= 6 and stripped.endswith('"""')
    return not text.endswith("\\")


def _prompt_session(out: Console, history: Path, commands: dict[str, Any]) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import NestedCompleter
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.output import create_output

    kept: History = InMemoryHistory()
    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        history.touch(mode=0o600)
        kept = FileHistory(str(history))
    except OSError:
        pass  # the chat works without
    return PromptSession(
        history=kept,
        completer=NestedCompleter.from_nested_dict(commands),
        complete_while_typing=False,
        key_bindings=_key_bindings(),
        multiline=True,
        prompt_continuation=lambda width, *_: " " * width,
        enable_history_search=True,
        output=None if out.is_terminal else create_output(stdout=sys.stderr),
    )


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_complete(buffer.text):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
