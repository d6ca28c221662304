"""`modelyard chat`, and the options that it shares with `modelyard run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from modelyard.cli.console import KeyOption, UrlOption, complete_models, run_or_exit

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
    from modelyard.cli.chat_loop import ChatLoop, find_model, make_screen, read_options
    from modelyard.cli.conversation import Conversation
    from modelyard.server.client import find_url

    settings, images = run_or_exit(read_options, system, parameters, think, image)
    address = find_url(url)
    name = run_or_exit(find_model, address, key, model)
    conversation = Conversation(address, name, key=key, settings=settings)
    loop = ChatLoop(conversation, make_screen(thinking), verbose=verbose, images=images)
    raise typer.Exit(loop.run())
