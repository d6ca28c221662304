"""`modelyard run`: one prompt or a conversation, on a running server or on one of its own."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.markup import escape

from modelyard.cli.chat import ImageOption, SetOption, SystemOption, ThinkingOption, ThinkOption, VerboseOption
from modelyard.cli.console import (
    ConfigOption,
    KeepAliveOption,
    KeyOption,
    UrlOption,
    complete_models,
    err,
    fail,
    load_or_exit,
    out,
    read_keep_alive,
    run_or_exit,
)
from modelyard.cli.models import make_progress, pull_model
from modelyard.core.errors import Forbidden, InvalidRequest, NotFound, Unauthenticated, Unavailable
from modelyard.server.client import ServerClient, find_url, is_local
from modelyard.server.running_servers import KEEP_ALIVE_S, BackgroundServer, find_server, kept_alive, stays_notice

if TYPE_CHECKING:
    from modelyard.config.settings import Config


def run(
    model: Annotated[
        str,
        typer.Argument(
            help="A name of the server or the library, a GGUF file, a folder, owner/repo[:quant] or a URL of the hub.",
            autocompletion=complete_models,
        ),
    ],
    prompt: Annotated[
        list[str] | None, typer.Argument(help="One message to answer; without it, a conversation.")
    ] = None,
    system: SystemOption = None,
    parameters: SetOption = None,
    think: ThinkOption = None,
    thinking: ThinkingOption = "auto",
    image: ImageOption = None,
    verbose: VerboseOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one reply as JSON, with usage and times.")] = False,
    url: UrlOption = None,
    key: KeyOption = None,
    config: ConfigOption = None,
    keep_alive: KeepAliveOption = "10m",
) -> None:
    """Run a model: answer one prompt, or talk with it. A model that is not here is fetched first.

    A running server is used; without one, a server is started, which stays
    for ten minutes after the last request (--keep-alive). The reply goes to standard output, everything else to
    standard error, so that pipes work:

      modelyard run smollm2 "Why is the sky blue?"
      modelyard run ./model.gguf                  a conversation: /help
      cat notes.txt | modelyard run qwen "Summarise"
      modelyard run llava "What is this?" -i photo.jpg
      modelyard run qwen --json "Name a colour" | jq -r .content

    The exit code is 0 for a reply, 1 for an error, 2 for wrong usage and 130
    for Ctrl-C.
    """
    from modelyard.cli.chat import ChatLoop, make_screen, one_shot_parts, read_options, stdin_is_terminal
    from modelyard.cli.chat_screen import ChatScreen
    from modelyard.cli.conversation import Conversation

    settings, images = run_or_exit(read_options, system, parameters, think, image)
    is_typed, asked = stdin_is_terminal(), " ".join(prompt or ())
    piped = b"" if is_typed or sys.stdin is None else sys.stdin.buffer.read()
    parts = run_or_exit(one_shot_parts, asked, piped, images)
    is_one_shot = bool(asked) or not is_typed or as_json
    if is_one_shot and not parts:
        err.print("[red]error[/red] there is no prompt: give one after the model, or pipe one in")
        raise typer.Exit(2)
    screen = ChatScreen(out, err, show_thinking=_shown(thinking)) if is_one_shot else make_screen(thinking)
    with served_model(model, url, key, config, run_or_exit(read_keep_alive, keep_alive)) as (address, name):
        conversation = Conversation(address, name, key=key, settings=settings)
        loop = ChatLoop(conversation, screen, verbose=verbose, images=() if is_one_shot else images)
        code = loop.once(parts, as_json=as_json) if is_one_shot else loop.run()
    raise typer.Exit(code)


def _shown(thinking: str) -> bool | None:
    return None if thinking == "auto" else thinking == "show"


@contextmanager
def served_model(
    model: str, url: str | None, key: str | None, config: Path | None, keep_alive_s: float | None = KEEP_ALIVE_S
) -> Iterator[tuple[str, str]]:
    """The URL of a server that has the model, and its name there. Exits with one line on an error. A server that is
    started for it stays for the next command."""
    from modelyard.config.load import EMBEDDED_DEFAULTS
    from modelyard.library.default_model import DEMO_NOTICE

    address = find_url(url)
    with ExitStack() as stack:
        server = stack.enter_context(ServerClient(address, key))
        try:
            is_running = server.is_running()
        except InvalidRequest as error:
            if url is not None:
                fail(error)
            is_running, address = False, f"http://127.0.0.1:{free_port()}"  # another program has the usual port
            server = stack.enter_context(ServerClient(address, key))
        if is_running:
            name = run_or_exit(_name_on_server, server, model)
        else:
            if not is_local(address):
                fail(Unavailable(f"no server answers at {address}"))
            name, env = _prepare(model, config)
            started = stack.enter_context(BackgroundServer(address, config, env, keep_alive_s))
            with err.status(f"[dim]starting {escape(name)} …[/dim]"):  # it is loaded while the user types
                run_or_exit(started.wait_until, server.is_running)
            if keep_alive_s != 0:
                err.print(f"[dim]{stays_notice(keep_alive_s)}[/dim]", highlight=False, soft_wrap=True)
        if name in EMBEDDED_DEFAULTS["models"] and err.is_terminal:
            err.print(f"[dim]{DEMO_NOTICE}[/dim]", highlight=False, soft_wrap=True)
        with kept_alive(find_server(address), server.is_running):
            yield address, name


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _name_on_server(server: ServerClient, model: str) -> str:
    """A name that the server lists; else a model of this machine, which a server on it sees as soon as it is here."""
    from modelyard.library.models import resolve_source

    names = _names(server)
    if model in names or _load_if_stopped(server, model):
        return model
    if not is_local(server.url):
        raise NotFound(f"the server at {server.url} has no model {model!r}; it has {', '.join(names) or 'none'}")
    try:
        resolve_source(model)
    except NotFound as error:
        raise NotFound(f"{error.message}. The server at {server.url} has {', '.join(names) or 'none'}") from None
    name = pull_model(model).name
    if name not in names and name not in _names(server):
        raise NotFound(
            f"{name} is in the library, and the server at {server.url} does not offer it: it has "
            f"{', '.join(names) or 'none'}. End that server, or name another one with --url"
        )
    return name


def _names(server: ServerClient) -> list[str]:
    """What can answer now or loads on request."""
    cards = server.get("/v1/models")["data"]
    return list(dict.fromkeys(str(name) for card in cards for name in (card["id"], *card.get("aliases", ()))))


def _load_if_stopped(server: ServerClient, model: str) -> bool:
    """Whether the server has it, but does not load it on request: it was unloaded by hand. The administrator of a
    server without keys is its user."""
    with suppress(Forbidden, Unauthenticated):
        for entry in server.get("/v1/admin/models")["data"]:
            if entry["state"] == "stopped" and model in (entry["id"], *entry["aliases"]):
                server.post(server.model_path(entry["id"], "load"), wait=False)
                return True
    return False


def _prepare(model: str, config: Path | None) -> tuple[str, dict[str, str]]:
    """Fetch what the model needs, with progress. Returns its name in the configuration, and the environment in which a
    server loads this model at start and others on demand."""
    from modelyard.config.load import EMBEDDED_DEFAULTS
    from modelyard.library import default_model
    from modelyard.server.serve import prepare

    configured = load_or_exit(config).config
    name = _configured_name(configured, model)
    if name is None and model in EMBEDDED_DEFAULTS["models"]:  # it is left out while other models are here
        run_or_exit(default_model.fetch, make_progress())
        configured, name = load_or_exit(config, quiet=True).config, model
    if name is None:
        name = pull_model(model).name
        configured = load_or_exit(config, quiet=True).config
    wanted = run_or_exit(configured.router().resolve, name, "").model
    only = {other: {"enabled": other == wanted, "autoload": True} for other in configured.models}
    loaded = load_or_exit(config, {"models": only}, quiet=True)
    run_or_exit(prepare, loaded.config, make_progress())
    return name, {**os.environ, "MODELYARD_MODELS": msgspec.json.encode(only).decode()}


def _configured_name(config: Config, model: str) -> str | None:
    return model if config.router().catalog.find(model) is not None else None
