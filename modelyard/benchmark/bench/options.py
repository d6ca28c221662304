"""The options of `modelyard bench`, each with what the help says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# --- who is measured --------------------------------------------------------------------------------------------------

Urls = Annotated[list[str] | None, typer.Option(help="A server, with or without /v1; give two to compare them.")]
Configs = Annotated[
    list[Path] | None, typer.Option(help="TOML or JSON file; without any, the one that serve would take.")
]
Models = Annotated[list[str] | None, typer.Option(help="Which model; without one, the first. Two: both of one place.")]
Keys = Annotated[
    list[str] | None, typer.Option(help="API key of the server, where it wants one.", envvar="MODELYARD_API_KEY")
]
Http = Annotated[bool, typer.Option("--http", help="Of a configured model: start a server and measure through it.")]
CacheName = Annotated[str | None, typer.Option(help="Which cache of the model; without one, its default.")]

# --- what is asked ----------------------------------------------------------------------------------------------------

WorkloadName = Annotated[
    str, typer.Option(help="What is asked: chat (short), agent (long, several turns) or batch (many streams).")
]
Streams = Annotated[str | None, typer.Option("--concurrency", "-c", help="How many streams at once, such as 1,4,8.")]
PromptTokens = Annotated[int | None, typer.Option(min=1, help="Length of the first prompt.")]
OutputTokens = Annotated[int | None, typer.Option(min=1, help="Length of an answer, at most.")]
Turns = Annotated[int | None, typer.Option(min=1, help="Requests in one conversation.")]
Body = Annotated[str | None, typer.Option(help="JSON fields for every request, such as '{\"ignore_eos\": true}'.")]
Seed = Annotated[int | None, typer.Option(help="Of the prompts; without it they are new in every run.")]

# --- for how long -----------------------------------------------------------------------------------------------------

Requests = Annotated[int | None, typer.Option(min=1, help="Requests in one round.")]
Duration = Annotated[str | None, typer.Option(help="Instead: how long a round lasts, such as 30s.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="How many; 3 if not set, 6 to compare.")]
Warmup = Annotated[int, typer.Option(min=0, help="Conversations a stream before the first round.")]
Limit = Annotated[str, typer.Option(help="An answer that takes longer is an error.")]

# --- what comes out ---------------------------------------------------------------------------------------------------

AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON instead of tables.")]
Plot = Annotated[Path | None, typer.Option(help="Draw it into this file: .svg, or .png with Pillow.")]
