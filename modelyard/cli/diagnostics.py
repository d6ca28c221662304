"""Commands for diagnosis: doctor (this machine), explain (cache reuse of the last requests), parse (raw output)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape

from modelyard.cli.console import (
    AdminKeyOption,
    ConfigOption,
    JsonOption,
    UrlOption,
    out,
    print_json,
    print_table,
    run_or_exit,
)
from modelyard.core.errors import NotFound
from modelyard.server.client import ServerClient, find_url
from modelyard.telemetry.prefix_tree import tree_lines

COLUMNS = ("ended", "prompt", "reused", "evaluated", "output", "cause", "from token")
_MAX_REQUESTS = 1000  # the admin API's limit

Row = tuple[str, ...]


def explain(
    session: Annotated[
        str | None, typer.Argument(help="The end of a session's name; default: the session of the newest request.")
    ] = None,
    last: Annotated[int, typer.Option(help="Number of requests.", min=1)] = 20,
    url: UrlOption = None,
    key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a session's last requests on a running server: how much of each prompt was cached, and why not more.

    Below them is the tree of what the session's cache holds, if conversations begin alike, are parked or stored.
    """
    url = find_url(url)
    found: list[Mapping[str, Any]] = run_or_exit(session_requests, url, key, session, last)
    if as_json:
        print_json(found)
        return
    out.print(escape(f"session {found[0]['session'] or '(none)'}, cache {found[-1]['cache']}"), soft_wrap=True)
    print_table(COLUMNS, [_row(record) for record in found])
    for line in run_or_exit(cache_tree, url, key, found[-1]):
        out.print(line, soft_wrap=True, highlight=False)


def session_requests(url: str, key: str | None, session: str | None, last: int) -> list[Mapping[str, Any]]:
    """The requests of one session, the newest last."""
    with ServerClient(url, key) as server:
        ended: Sequence[Mapping[str, Any]] = server.get("/v1/admin/requests", limit=_MAX_REQUESTS)["ended"]
    if not ended:
        raise NotFound(f"{url} has not answered any request yet")
    if session is None:
        found = [record for record in ended if record["session"] == ended[0]["session"]]
    else:
        found = [record for record in ended if (record["session"] or "").endswith(session)]
    chosen = found[:last]
    if not chosen:
        raise NotFound(f"none of the last {len(ended)} requests belongs to a session that ends in {session!r}")
    return [*reversed(chosen)]


def cache_tree(url: str, key: str | None, record: Mapping[str, Any]) -> list[str]:
    """Of the cache that a request went to, in every replica that has one."""
    with ServerClient(url, key) as server:
        rows: Sequence[Mapping[str, Any]] = server.get("/v1/admin/caches")["data"]
    of_cache = (row for row in rows if (row["model"], row["cache"]) == (record["model"], record["cache"]))
    return [line for row in of_cache for line in tree_lines(row.get("prefixes", ()))]


def _row(record: Mapping[str, Any]) -> Row:
    usage, reuse = record["usage"], record["reuse"]
    when = datetime.fromtimestamp(record["at"]).astimezone().strftime("%H:%M:%S")
    if reuse is None:  # the engine renders by itself, or the request never reached it
        counts = (usage["prompt"], usage["cached"], usage["prompt"] - usage["cached"])
        return (when, *map(str, counts), str(usage["output"]), f"({record['status']})", "")
    counts = (reuse["reused"] + reuse["evaluated"], reuse["reused"], reuse["evaluated"])
    where = ""
    if reuse["token"] is not None:
        message = reuse["message"]
        where = str(reuse["token"]) + ("" if message is None else f", message {message} ({reuse['role'] or 'gone'})")
    return (when, *map(str, counts), str(usage["output"]), reuse["cause"], where)


_MARKS = {"ok": "[green]✓[/green]", "note": "[dim]·[/dim]", "warning": "[yellow]![/yellow]", "error": "[red]✗[/red]"}


def doctor(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show what this machine has, what is used of it, what is missing, and the command that fixes it.

    It looks for GPUs and their drivers, tests the llama.cpp library, and reads the configuration. The exit status is 1
    if something that is needed does not work.
    """
    from modelyard.server.doctor import examine, is_broken

    sections = examine(config)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(sections), indent=2).decode() + "\n")
    else:
        for section in sections:
            out.print(f"[bold]{section.title}[/bold]")
            for line in section.lines:
                out.print(
                    f"  {_MARKS[line.status]} {line.name:<16} {escape(line.value)}", soft_wrap=True, highlight=False
                )
                if line.fix:
                    out.print(f"    [cyan]→ {escape(line.fix)}[/cyan]", soft_wrap=True, highlight=False)
    raise typer.Exit(1 if is_broken(sections) else 0)


def parse(
    format: Annotated[str, typer.Option(help="The model's output format, or auto to detect it from --template.")],
    template: Annotated[Path | None, typer.Option(help="A chat template, for --format auto.", exists=True)] = None,
    tools: Annotated[
        Path | None, typer.Option(help="JSON list of the offered tools; default: any name is a call.", exists=True)
    ] = None,
    chunks: Annotated[int | None, typer.Option(help="Feed this many characters at a time.", min=1)] = None,
    prefill: Annotated[str, typer.Option(help="The end of the prompt, for example if it opened the reasoning.")] = "",
) -> None:
    """Read a model's raw output from standard input and print its reasoning, content and tool calls as JSON."""
    from modelyard.scanner.parse_output import parse_command

    def work() -> str:
        return parse_command(
            sys.stdin.buffer.read().decode("utf-8", "replace"),
            format=format,
            template=template.read_text("utf-8") if template else None,
            tools=tools.read_bytes() if tools else None,
            chunk=chunks,
            prefill=prefill,
        )

    sys.stdout.write(run_or_exit(work) + "\n")
