"""`modelyard chat`: a terminal chat with any server, through the client role of the Chat protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import httpx
import msgspec
import typer
from rich.console import Console
from rich.text import Text as Styled

from modelyard.cli.console import DEFAULT_URL, KeyOption, UrlOption, out, run_or_exit
from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound, Unavailable
from modelyard.core.events import BlockDelta, BlockKind, BlockStart, Event, Finished, ReplyBuilder
from modelyard.core.request import Message, Request, Text
from modelyard.protocols import openai_chat


def chat(
    model: Annotated[
        str | None, typer.Argument(help="Any model name of the server; default: the first that it lists.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
) -> None:
    """Chat with a running server in the terminal. Ctrl-D ends it, Ctrl-C stops a reply."""
    run_or_exit(ChatSession(url, model, key=key, system=system).run, ChatScreen(out))


class ChatScreen:
    """Reads input and shows replies; reasoning is dim, tool calls are named."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._kind: BlockKind = "text"

    def ask(self) -> str | None:
        try:
            return self._console.input("[bold cyan]› [/bold cyan]")
        except (EOFError, KeyboardInterrupt):
            return None

    def show(self, event: Event) -> None:
        if isinstance(event, BlockStart):
            self._print("\n" if event.index else "")
            self._kind = event.kind
            if event.kind == "tool_call":
                self._print(f"calls {event.name} ", _STYLES["tool_call"])
        elif isinstance(event, BlockDelta):
            self._print(event.text, _STYLES[self._kind])

    def note(self, text: str) -> None:
        self._print(f"\n{text}\n", "dim")

    def show_error(self, error: ModelyardError) -> None:
        self._print(f"\n{error.message}\n", "red")

    def _print(self, text: str, style: str = "") -> None:
        """Print the model's text literally: no markup, no emoji codes, no terminal escapes."""
        self._console.print(Styled(text.replace("\x1b", "␛"), style), end="", soft_wrap=True)


_STYLES: dict[BlockKind, str] = {"text": "", "thinking": "dim italic", "tool_call": "yellow"}


class ChatSession:
    """Without a model name, the first that the server lists."""

    def __init__(
        self, url: str, model: str | None = None, *, key: str | None = None, system: str | None = None
    ) -> None:
        self._url, self._model = url.rstrip("/"), model
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self.messages: list[Message] = [Message("system", (Text(system),))] if system else []

    def run(self, screen: ChatScreen) -> None:
        """Until the end of input. A message whose request failed is dropped, so that it can be sent again."""
        with httpx.Client(timeout=httpx.Timeout(10, read=None), headers=self._headers) as client:
            while (asked := screen.ask()) is not None:
                if not asked.strip():
                    continue
                self.messages.append(Message("user", (Text(asked),)))
                try:
                    self._turn(client, screen)
                except ModelyardError as error:
                    self.messages.pop()
                    screen.show_error(error)

    def _turn(self, client: httpx.Client, screen: ChatScreen) -> None:
        reply, text, is_text = ReplyBuilder(), "", False  # the text shown so far is the reply if the user interrupts
        try:
            for event in self._events(client):
                reply.feed([event])  # raises the error of a Failed
                if isinstance(event, BlockStart):
                    is_text = event.kind == "text"
                elif isinstance(event, BlockDelta) and is_text:
                    text += event.text
                screen.show(event)
                if isinstance(event, Finished):
                    screen.note(f"{event.usage.prompt} + {event.usage.output} tokens, {event.reason}")
        except KeyboardInterrupt:
            screen.note("stopped")
        if reply.finished:
            self.messages.append(Message("assistant", tuple(block.part for block in reply.reply().blocks)))
        elif text:
            self.messages.append(Message("assistant", (Text(text),)))
        else:
            self.messages.pop()

    def _events(self, client: httpx.Client) -> Iterator[Event]:
        with self._explained_errors():
            model = self._model = self._model or self._first_model(client)
            request = Request(model=model, messages=tuple(self.messages), stream=True, include_usage=True)
            body, reader = openai_chat.write_request(request), openai_chat.reader()
            with client.stream("POST", f"{self._url}/v1/chat/completions", content=body) as reply:
                _check(reply)
                for data in reply.iter_bytes():
                    yield from reader.feed(data)
                yield from reader.finish()

    def _first_model(self, client: httpx.Client) -> str:
        reply = client.get(f"{self._url}/v1/models")
        _check(reply)
        try:
            return str(msgspec.json.decode(reply.content)["data"][0]["id"])
        except (msgspec.MsgspecError, LookupError, TypeError):
            raise NotFound(f"{self._url} lists no models; name one: modelyard chat NAME") from None

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError:
            raise Unavailable(f"no server answers at {self._url}; start one with: modelyard serve") from None
        except httpx.InvalidURL as error:
            raise InvalidRequest(f"{self._url} is not a URL: {error}") from None
        except httpx.HTTPError as error:
            raise Unavailable(f"the connection to {self._url} broke: {error}") from None


def _check(reply: httpx.Response) -> None:
    if reply.status_code != 200:
        raise openai_chat.read_error(reply.status_code, reply.headers, reply.read())
