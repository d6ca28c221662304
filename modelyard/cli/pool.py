"""Commands about a running server: ps, stop, status, logs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from modelyard.cli.console import (
    AdminKeyOption,
    JsonOption,
    UrlOption,
    complete_models,
    fail,
    out,
    print_json,
    print_table,
    run_or_exit,
)
from modelyard.core.errors import Forbidden, InvalidRequest, NotFound, Unauthenticated, Unavailable
from modelyard.core.units import format_duration, format_size
from modelyard.server.client import Json, ServerClient, find_url, no_server

if TYPE_CHECKING:
    from modelyard.server.running_servers import RunningServer

_SHOWN = ("ready", "loading", "draining")
_STOP_S = 120.0
_FOLLOW_S = 0.5

ServedModel = Annotated[
    str | None, typer.Argument(help="A model of the server, by name or alias.", autocompletion=complete_models)
]


# --- ps ---------------------------------------------------------------------------------------------------------------


def ps(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also the models that are not loaded.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """List the loaded models: engine, memory, context, slots, and how long they stay.

    Example: [bold]modelyard ps --all[/bold]
    """
    with ServerClient(find_url(url), key) as server:
        models = run_or_exit(server.get, "/v1/admin/models")["data"]
    shown = [model for model in models if everything or model["state"] in _SHOWN]
    if as_json:
        print_json([model_summary(model, time.time()) for model in shown])
        return
    if shown:
        columns = ("model", "engine", "state", "memory", "context", "slots", "until")
        print_table(columns, [tuple(_cells(model_summary(model, time.time()))) for model in shown])
    else:
        names = ", ".join(model["id"] for model in models) or "none"
        out.print(f"no model is loaded; the server has {escape(names)}", soft_wrap=True)


def _cells(row: Json) -> Iterator[str]:
    memory = f"{format_size(row['memory'])} {row['processor'] or ''}".rstrip() if row["memory"] else ""
    slots = f"{row['running']}/{row['slots']}" if row["slots"] else ""
    yield from (row["model"], row["engine"], row["state"], memory, row["context"], slots, row["until"])


def model_summary(model: Json, now: float) -> Json:
    """The row of one model. Memory is in bytes: what its load took, or the estimate; none while it is not loaded."""
    is_loaded, caches = model["state"] in _SHOWN, model["caches"].values()
    estimate = model["memory"]["estimate"] or {} if is_loaded else {}
    contexts = ", ".join(f"{cache['parallel']} × {cache['window'] or 'unknown'}" for cache in caches)
    return {
        "model": model["id"],
        "engine": model["backend"],
        "state": _state(model),
        "memory": (model["memory"]["measured"] or estimate.get("total") or None) if is_loaded else None,
        "processor": estimate.get("device", "").upper() or None,
        "context": contexts,
        "running": model["queue"]["running"],
        "slots": model["queue"]["slots"],
        "until": _until(model, now),
    }


def _state(model: Json) -> str:
    state: str = model["state"]
    if state == "loading":
        return f"loading {100 * model['progress']:.0f} %"
    if state == "stopped" and model["loads_on_request"]:
        return "on demand"
    return state


def _until(model: Json, now: float) -> str:
    """How long the model stays loaded, if nothing uses it."""
    ttl, state = model["load_constraints"]["idle_ttl_s"], model["state"]
    if state not in _SHOWN:
        return str(model["reason"] or "")
    if ttl is None:
        return "you stop it"
    if model["queue"]["running"] or model["last_used"] is None:
        return f"{format_duration(ttl)} idle"
    return f"in {format_duration(max(0.0, model['last_used'] + ttl - now))}"


# --- stop -------------------------------------------------------------------------------------------------------------


def stop(
    model: ServedModel = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Unload every model.")] = False,
    the_server: Annotated[bool, typer.Option("--server", help="End the server itself.")] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Do not wait for running requests.")] = False,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Unload a model to free its memory, or end the server. Running requests finish first.

    Examples: [bold]modelyard stop qwen[/bold], [bold]modelyard stop --server[/bold]
    """
    if (model is not None) + everything + the_server != 1:
        fail(InvalidRequest("name a model to unload, or give --all or --server"))
    from modelyard.server.running_servers import stop_server

    address = find_url(url)
    if the_server:
        server = run_or_exit(_find_server, address)
        run_or_exit(lambda: stop_server(server, _STOP_S, force=force))
        out.print(f"the server at {address} has ended")
        return
    with ServerClient(address, key, timeout_s=None) as client:
        for name in run_or_exit(_models_to_stop, client, model):
            run_or_exit(lambda name=name: client.post(client.model_path(name, "unload"), force=force))
            out.print(f"{escape(name)} is unloaded")


def _find_server(url: str) -> RunningServer:
    from modelyard.server.running_servers import running_servers

    port = url.rpartition(":")[2]
    found = [server for server in running_servers() if server.url == url or str(server.port) == port]
    if not found:
        with ServerClient(url) as client:
            if client.is_running():
                raise NotFound(f"the server at {url} belongs to another user or machine: end it there")
        raise no_server(url)
    return found[0]


def _models_to_stop(client: ServerClient, wanted: str | None) -> list[str]:
    models = client.get("/v1/admin/models")["data"]
    loaded = [model["id"] for model in models if model["state"] in _SHOWN]
    if wanted is None:
        return loaded
    named = next((model for model in models if wanted in (model["id"], *model["aliases"])), None)
    if named is None:
        raise NotFound(f"the server has no model {wanted!r}; loaded: {', '.join(loaded) or 'none'}")
    if named["id"] not in loaded:
        raise NotFound(f"{named['id']} is not loaded; loaded: {', '.join(loaded) or 'none'}")
    return [named["id"]]


# --- status -----------------------------------------------------------------------------------------------------------


def status(as_json: JsonOption = False, url: UrlOption = None, key: AdminKeyOption = None) -> None:
    """Say whether a server runs, and what it does: models, memory, queue, requests. The exit code is 1 without one."""
    address = find_url(url)
    with ServerClient(address, key) as client:
        found = run_or_exit(server_report, client)
    if as_json:
        print_json(found)
        return
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for label, value in status_rows(found, time.time()):
        table.add_row(f"[bold]{label}[/bold]", escape(value))
    out.print(table)


def server_report(client: ServerClient) -> Json:
    """What the server says about itself. Without an admin key, only its health."""
    from modelyard.server.running_servers import find_server

    local = find_server(client.url)
    found: Json = {"url": client.url, **client.health(), "pid": local.pid if local else None}
    found["since"] = local.created if local else None
    try:
        memory, requests = client.get("/v1/admin/gpu-memory"), client.get("/v1/admin/requests", limit=1000)
        models, aside = client.get("/v1/admin/models")["data"], client.get("/v1/admin/set-aside")["data"]
    except (Forbidden, Unauthenticated) as error:
        return {**found, "note": error.message}
    now = time.time()
    return {
        **found,
        "models": [model_summary(model, now) for model in models],
        "memory": {"ram": memory["ram"], "gpus": memory["gpus"]},
        "set_aside": aside,
        "queue": {state: sum(one["state"] == state for one in requests["live"]) for state in ("running", "waiting")},
        "requests": _summary([one for one in requests["ended"] if one["at"] > now - 3600]),
    }


def _summary(ended: Sequence[Json]) -> Json:
    speeds = [one["tokens_per_s"] for one in ended if one["tokens_per_s"]]
    prompt = sum(one["usage"]["prompt"] for one in ended)
    return {
        "last_hour": len(ended),
        "failed": sum(one["state"] == "failed" for one in ended),
        "tokens_per_s": median(speeds) if speeds else None,
        "reused": sum(one["usage"]["cached"] for one in ended) / prompt if prompt else None,
    }


def status_rows(found: Json, now: float) -> Iterator[tuple[str, str]]:
    process = f", process {found['pid']}, up {format_duration(now - found['since'])}" if found["pid"] else ""
    yield "server", f"{found['url']}, version {found['version']}, {found['status']}{process}"
    if "note" in found:
        yield "", f"{found['active_requests']} requests run; {found['note']}"
        return
    models = found["models"]
    by_state = {
        label: [m["model"] for m in models if m["state"].split()[0] == state]
        for label, state in (("loaded", "ready"), ("loading", "loading"), ("on demand", "on"), ("failed", "failed"))
    }
    parts = [f"{len(names)} {label} ({', '.join(names[:5])})" for label, names in by_state.items() if names]
    yield "models", "; ".join(parts) or "none is loaded"
    if found["set_aside"]:
        aside = ", ".join(found["set_aside"])
        yield "set aside", f"{aside}: the server died twice with it. `modelyard run NAME` tries a model again"
    ram, used = found["memory"]["ram"], sum(m["memory"] or 0 for m in models if m["state"] == "ready")
    gpus = "".join(
        f"; GPU {gpu['index']}: {format_size(gpu['free'])} of {format_size(gpu['total'])} free"
        for gpu in found["memory"]["gpus"]
    )
    free = f"{format_size(ram['free'])} of {format_size(ram['total'])} RAM free"
    yield "memory", f"{format_size(used)} for models; {free}{gpus}"
    yield "queue", f"{found['queue']['running']} running, {found['queue']['waiting']} waiting"
    done = found["requests"]
    speed = f", {done['tokens_per_s']:.3g} tokens/s" if done["tokens_per_s"] else ""
    reuse = f", {100 * done['reused']:.0f} % of prompts cached" if done["reused"] is not None else ""
    yield "requests", f"{done['last_hour']} in the last hour, {done['failed']} failed{speed}{reuse}"


# --- logs -------------------------------------------------------------------------------------------------------------

_COLOURS = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}
_OWN_FIELDS = ("at", "time", "level", "logger", "message", "request_id", "error")


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new lines until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=2000, help="How many of the last lines.")] = 100,
    level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"], typer.Option(help="The least severe level.")
    ] = "debug",
    request: Annotated[str, typer.Option(help="Only lines of this request: its id, or the end of it.")] = "",
    model: Annotated[
        str | None,
        typer.Option(help="Instead: the output of this model's own process.", autocompletion=complete_models),
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Show the log of a running server.

    Examples: [bold]modelyard logs -f --level warning[/bold], [bold]modelyard logs --request 5e1f[/bold]
    """
    with ServerClient(find_url(url), key) as client:
        if model is not None:
            for line in run_or_exit(client.get, client.model_path(model, "log"))["lines"]:
                sys.stdout.write(line.rstrip("\n") + "\n")
            return
        for entry in run_or_exit_iter(log_entries(client, lines, level, request, follow)):
            if as_json:
                sys.stdout.write(msgspec.json.encode(entry).decode() + "\n")
                sys.stdout.flush()
            else:
                _print_entry(entry)


def run_or_exit_iter(entries: Iterator[Json]) -> Iterator[Json]:
    while (entry := run_or_exit(next, entries, None)) is not None:
        yield entry


def log_entries(client: ServerClient, lines: int, level: str, request: str, follow: bool) -> Iterator[Json]:
    found = client.get("/v1/admin/logs", limit=lines, level=level, id=request)["lines"]
    yield from found
    newest = found[-1]["at"] if found else time.time()
    while follow:
        time.sleep(_FOLLOW_S)
        try:
            found = client.get("/v1/admin/logs", limit=2000, level=level, id=request, since=newest)["lines"]
        except Unavailable:
            raise Unavailable(f"the server at {client.url} has ended") from None
        yield from found
        newest = found[-1]["at"] if found else newest


def _print_entry(entry: Json) -> None:
    clock = datetime.fromtimestamp(entry["at"]).astimezone().strftime("%H:%M:%S")
    trace = f"[{entry['request_id']}] " if entry.get("request_id") else ""
    fields = "".join(f" {name}={value}" for name, value in entry.items() if name not in _OWN_FIELDS and value != "")
    text = f"{clock} {entry['level'].upper():<8}{trace}{entry['message']}{fields}"
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    style = _COLOURS.get(entry["level"], "")
    out.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
    if entry.get("error"):
        out.print(entry["error"], style="dim", markup=False, highlight=False, soft_wrap=True)
