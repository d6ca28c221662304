"""`modelyard chat`: its options, which `modelyard run` shares, and the loop of messages, slash commands and replies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import msgspec
import typer
from rich.markup import escape

from modelyard.cli.chat_screen import ChatScreen, TerminalScreen
from modelyard.cli.console import KeyOption, UrlOption, complete_models, err, out, run_or_exit
from modelyard.cli.conversation import (
    PARAMETERS,
    Conversation,
    ConversationSettings,
    image_part,
    image_type,
    message_parts,
    read_image,
    set_parameter,
)
from modelyard.config.problems import suggest
from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound, Unavailable
from modelyard.core.events import Reply
from modelyard.core.request import Image, Part, Text
from modelyard.library.cache_dir import cache_dir
from modelyard.server.client import ServerClient, is_local, no_server

INTERRUPTED = 130
_POLL_S = 0.5
_CUT = {"max_tokens": "max_tokens is reached", "window": "the window is full", "repetition": "it repeated itself"}


# --- from the options to a loop ---------------------------------------------------------------------------------------


def read_options(
    system: str | None, parameters: list[str] | None, think: bool | None, images: list[Path] | None
) -> tuple[ConversationSettings, tuple[Image, ...]]:
    settings = ConversationSettings(system=system or "", think=think)
    for parameter in parameters or ():
        name, is_pair, value = parameter.partition("=")
        if not is_pair:
            raise InvalidRequest(f"--set takes NAME=VALUE, such as temperature=0.2, and not {parameter!r}")
        set_parameter(settings, name.strip(), value.strip())
    return settings, tuple(read_image(path) for path in images or ())


def find_model(url: str, key: str | None, model: str | None) -> str:
    """The given name, or the first that the server lists. Raises if there is no server."""
    with ServerClient(url, key) as server:
        if not server.is_running():
            raise Unavailable(f"{no_server(url).message}, or talk to a model without one: modelyard run MODEL")
        if model is not None:
            return model
        cards = server.get("/v1/models")["data"]
    ready = [card for card in cards if card.get("state") in ("ready", "loading")]
    if not cards:
        raise NotFound(f"{url} lists no models; name one: modelyard chat NAME")
    return str((ready or cards)[0]["id"])


def stdin_is_terminal() -> bool:
    """It is None for a program that was started without one."""
    return sys.stdin is not None and sys.stdin.isatty()


def make_screen(thinking: str) -> ChatScreen:
    show = None if thinking == "auto" else thinking == "show"
    if not stdin_is_terminal():
        return ChatScreen(out, err, show_thinking=show)
    return TerminalScreen(out, err, cache_dir(os.environ) / "chat_history", COMPLETIONS, show_thinking=show)


# --- the loop ---------------------------------------------------------------------------------------------------------


class ChatLoop:
    """Reads messages and commands, and shows replies. `images` go with the next message."""

    def __init__(
        self,
        conversation: Conversation,
        screen: ChatScreen,
        *,
        verbose: bool = False,
        images: tuple[Image, ...] = (),
    ) -> None:
        self.conversation, self.screen, self.verbose = conversation, screen, verbose
        self._images = images
        self._failed = False

    def run(self) -> int:
        """Until the end of the input; the exit code. On a terminal an error ends nothing; from a pipe it counts."""
        with asyncio.Runner() as runner:
            while (text := self.screen.ask()) is not None:
                if not text.strip():
                    continue
                try:
                    if is_command(text):
                        if self._command(runner, text) == "end":
                            break
                    else:
                        self._reply_to(runner, message_parts(text, self._images))
                        self._images = ()
                except ModelyardError as error:
                    self._failed = True
                    self.screen.show_error(error)
                except KeyboardInterrupt:
                    self.screen.note("stopped")
        return 0 if isinstance(self.screen, TerminalScreen) or not self._failed else 1

    def once(self, parts: tuple[Part, ...], *, as_json: bool = False) -> int:
        """One message and its reply; the exit code."""
        try:
            with asyncio.Runner() as runner:
                reply = runner.run(self._turn(parts, silent=as_json))
        except ModelyardError as error:
            self.screen.show_error(error)
            return 1
        except KeyboardInterrupt:
            self.screen.end_line()
            return INTERRUPTED
        if as_json and reply is not None:
            sys.stdout.write(msgspec.json.encode(self._as_json(reply)).decode() + "\n")
        return 0

    def _reply_to(self, runner: asyncio.Runner, parts: tuple[Part, ...]) -> None:
        runner.run(self._turn(parts))

    async def _turn(self, parts: tuple[Part, ...], *, silent: bool = False) -> Reply | None:
        """Ctrl-C cancels it: the runner turns the signal into a cancellation, and then into KeyboardInterrupt."""
        screen = self.screen
        with screen.waiting(f"{escape(self.conversation.model)} …"):
            watching = asyncio.create_task(self._watch_loading())
            try:
                reply = await self.conversation.ask(parts, (lambda _: None) if silent else screen.show)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        screen.end_line()
        if reply is not None:
            if self.verbose:
                screen.note(self._speed(reply))
            elif (why := _CUT.get(reply.finished.reason)) is not None:
                screen.note(f"the reply was cut off: {why}")
        return reply

    async def _watch_loading(self) -> None:
        """Show how far the model is loaded while its first reply waits for it."""
        url, name = self.conversation.url, self.conversation.model
        headers = {"authorization": f"Bearer {self.conversation.key}"} if self.conversation.key else {}
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
            async with httpx.AsyncClient(headers=headers, trust_env=not is_local(url)) as client:
                while True:
                    await asyncio.sleep(_POLL_S)
                    model = (await client.get(f"{url}/health")).json()["models"].get(name, {})
                    if model.get("state") == "loading":
                        self.screen.update_waiting(f"loading {escape(name)}: {100 * model.get('progress', 0):.0f} %")
                    elif model.get("waiting"):
                        self.screen.update_waiting(f"{escape(name)}: {model['waiting']} requests wait")
                    else:
                        self.screen.update_waiting(f"{escape(name)} …")

    def _speed(self, reply: Reply) -> str:
        usage, times = reply.finished.usage, self.conversation.times
        decode = times.total - times.first
        speed = f" at {(usage.output - 1) / decode:.3g} tokens/s" if usage.output > 1 and decode > 0 else ""
        cached = f" ({usage.cached} cached)" if usage.cached else ""
        first = f"first after {times.first:.2f} s, " if times.first else ""
        tokens = f"{usage.prompt} tokens in{cached}, {usage.output} out{speed}"
        return f"{tokens}; {first}{times.total:.2f} s in all; ended by {reply.finished.reason}"

    def _as_json(self, reply: Reply) -> dict[str, Any]:
        return {
            "model": self.conversation.model,
            "content": reply.text,
            "reasoning": reply.thinking,
            "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in reply.calls],
            "finish_reason": reply.finished.reason,
            "usage": reply.finished.usage,
            "first_token_s": round(self.conversation.times.first, 4),
            "total_s": round(self.conversation.times.total, 4),
        }

    # --- commands -----------------------------------------------------------------------------------------------------

    def _command(self, runner: asyncio.Runner, text: str) -> str | None:
        name, _, rest = text.strip().partition(" ")
        rest = rest.strip()
        if name in ("/bye", "/exit", "/quit"):
            return "end"
        if name == "/retry":
            self._reply_to(runner, self.conversation.take_back())
            return None
        handlers: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/?": self._help,
            "/clear": self._clear,
            "/system": self._system,
            "/set": self._set,
            "/model": self._model,
            "/image": self._image,
            "/think": self._think,
            "/show": self._show,
            "/save": lambda path: self._with_file(path, self.conversation.save, "saved to"),
            "/load": lambda path: self._with_file(path, self.conversation.load, "continued from"),
        }
        handler = handlers.get(name)
        if handler is None:
            raise InvalidRequest(f"there is no command {name}; /help lists them.{suggest(name, HELP)}")
        handler(rest)
        return None

    def _help(self, _: str) -> None:
        self.screen.rows((f"{name} {usage}".strip(), text) for name, (usage, text) in HELP.items())
        self.screen.rows([("", "")])
        self.screen.rows(KEYS.items())

    def _clear(self, _: str) -> None:
        self.conversation.messages.clear()
        self._images = ()
        self.screen.note("the conversation is empty")

    def _system(self, text: str) -> None:
        if text:
            self.conversation.settings.system = "" if text == "none" else text.strip('"')
        self.screen.note(f"system prompt: {self.conversation.settings.system or 'none'}")

    def _set(self, text: str) -> None:
        name, _, value = text.replace("=", " ", 1).partition(" ")
        settings = self.conversation.settings
        if name == "verbose":
            self.verbose = value.strip() != "off"
        elif name:
            set_parameter(settings, name, value.strip())
        self.screen.rows(self._parameters())

    def _parameters(self) -> Iterator[tuple[str, str]]:
        found = self.conversation.settings.decoding
        yield from ((name, str(value)) for name, value in found.items())
        if not found:
            yield "parameters", "those of the model"

    def _model(self, name: str) -> None:
        with ServerClient(self.conversation.url, self.conversation.key) as server:
            known = [str(card["id"]) for card in server.get("/v1/models")["data"]]
            if name:
                server.get(f"/v1/models/{name}")  # any name that the server resolves
                self.conversation.model = name
        self.screen.note(f"model: {self.conversation.model}; the server has {', '.join(known)}")

    def _image(self, path: str) -> None:
        if not path:
            raise InvalidRequest("/image takes the path of an image")
        self._images = (*self._images, read_image(Path(path.strip("\"'"))))
        count = len(self._images)
        self.screen.note(f"{count} image{'s' * (count > 1)} will go with your next message")

    def _think(self, text: str) -> None:
        choices: dict[str, bool | None] = {"on": True, "off": False, "auto": None}
        if text in ("show", "hide"):
            self.screen.show_thinking = text == "show"
        elif text in choices:
            self.conversation.settings.think = choices[text]
        elif text:
            raise InvalidRequest("/think takes on, off or auto for the model, and show or hide for the screen")
        now = {value: name for name, value in choices.items()}[self.conversation.settings.think]
        self.screen.note(f"thinking: {now}, {'shown' if self.screen.show_thinking else 'hidden'}")

    def _show(self, _: str) -> None:
        settings = self.conversation.settings
        rows = [
            ("model", self.conversation.model),
            ("server", self.conversation.url),
            ("system", settings.system or "none"),
            *self._parameters(),
        ]
        self.screen.rows(rows)
        for message in self.conversation.messages:
            self.screen.rows([(message.role, "".join(_shown_part(part) for part in message.parts))])

    def _with_file(self, path: str, work: Callable[[Path], None], done: str) -> None:
        if not path:
            raise InvalidRequest("name a file, such as talk.json")
        file = Path(path.strip("\"'")).expanduser()
        work(file)
        self.screen.note(f"{done} {file}: {len(self.conversation.messages)} messages")


HELP: dict[str, tuple[str, str]] = {
    "/help": ("", "this list"),
    "/clear": ("", "forget the conversation and start anew"),
    "/system": ("TEXT", "set the system prompt; none removes it"),
    "/set": ("NAME VALUE", "set temperature, top_p, max_tokens, seed …; without a value, as the model has it"),
    "/model": ("NAME", "continue with another model of the server"),
    "/image": ("PATH", "send an image with the next message; a path in the message does it too"),
    "/think": ("on|off|auto|show|hide", "whether the model reasons first, and whether that is shown"),
    "/retry": ("", "drop the last reply and ask again"),
    "/show": ("", "the model, the settings and the conversation"),
    "/save": ("FILE", "write the conversation to a file"),
    "/load": ("FILE", "continue a saved conversation"),
    "/bye": ("", "end; also Ctrl-D"),
}
KEYS = {
    "Ctrl-C": "stop the reply",
    '"""': "begin and end a message of several lines; also Alt-Enter, or a backslash at the end of a line",
    "↑ ↓ Ctrl-R": "earlier messages",
}
COMPLETIONS: dict[str, Any] = {
    **dict.fromkeys(HELP),
    "/set": dict.fromkeys((*PARAMETERS, "verbose")),
    "/think": dict.fromkeys(("on", "off", "auto", "show", "hide")),
}


def is_command(text: str) -> bool:
    """A message may begin with a path: `/etc/hosts is …`."""
    first = text.strip().partition(" ")[0]
    return first.startswith("/") and "/" not in first[1:] and "\n" not in text.strip()


def _shown_part(part: Part) -> str:
    if isinstance(part, Image):
        return "[image] "
    return part.text if isinstance(part, Text) else f"[{type(part).__name__.lower()}] " if part else ""


# --- a message from the command line and a pipe -----------------------------------------------------------------------


def one_shot_parts(prompt: str, piped: bytes, images: tuple[Image, ...]) -> tuple[Part, ...]:
    """The prompt, then the text of the pipe. An image in the pipe becomes an image."""
    if image_type(piped) is not None:
        return message_parts(prompt, (*images, image_part(piped, "standard input")))
    text = piped.decode("utf-8", "replace").strip()
    parts = message_parts(prompt, images) if prompt or images else ()
    return (*parts, Text(f"\n\n{text}" if prompt else text)) if text else parts


# --- options that chat and run share ----------------------------------------------------------------------------------

SystemOption = Annotated[str | None, typer.Option("--system", "-s", help="A system prompt.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A sampling parameter, such as temperature=0.2; repeat it."),
]
ThinkOption = Annotated[
    bool | None, typer.Option("--think/--no-think", help="Let the model reason first, or not; default: as it does.")
]
ThinkingOption = Annotated[
    Literal["show", "hide", "auto"],
    typer.Option(help="Whether reasoning is shown; auto shows it on a terminal and keeps it out of pipes."),
]
ImageOption = Annotated[
    list[Path] | None, typer.Option("--image", "-i", help="An image for the first message; repeat it.")
]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show tokens, times and speed of each reply.")]


def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Any model name of the server; default: the first that it lists.", autocompletion=complete_models
        ),
    ] = None,
    url: UrlOption = None,
    key: KeyOption = None,
    system: SystemOption = None,
    parameters: SetOption = None,
    think: ThinkOption = None,
    thinking: ThinkingOption = "auto",
    image: ImageOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Chat with a running server in the terminal. Ctrl-C stops a reply, Ctrl-D ends the chat, /help lists commands.

    Without a server, [bold]modelyard run MODEL[/bold] starts one. From a pipe, every line is a message.
    """
    from modelyard.cli.conversation import Conversation
    from modelyard.server.client import find_url

    settings, images = run_or_exit(read_options, system, parameters, think, image)
    address = find_url(url)
    name = run_or_exit(find_model, address, key, model)
    conversation = Conversation(address, name, key=key, settings=settings)
    loop = ChatLoop(conversation, make_screen(thinking), verbose=verbose, images=images)
    raise typer.Exit(loop.run())
