"""`modelyard keys`: the API keys of a server, and the keys of a cluster.

The keys of a running server are managed over its admin API. If none runs on this machine, the commands change the file
that the next one reads: the first admin key of a public server is created this way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import typer
from rich.markup import escape

from modelyard.accounts.settings import KeyRole
from modelyard.cli.console import (
    AdminKeyOption,
    CommandGroup,
    ConfigOption,
    JsonOption,
    UrlOption,
    err,
    load_or_exit,
    out,
    print_json,
    print_table,
    run_or_exit,
)
from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.server.client import Json, ServerClient, find_url

keys_app = CommandGroup(
    help="List, create and revoke API keys; create the keys of a cluster.",
    rich_markup_mode="rich",
)


class KeyManager:
    """The keys of the server at this address; without a server there, those in the file of the configuration."""

    def __init__(self, url: str | None, key: str | None, config: Path | None) -> None:
        self._client, self._config = ServerClient(find_url(url), key), config
        try:
            self.is_offline = url is None and not self._client.is_running()
        except BaseException:
            self._client.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def all(self, revoked: bool) -> Json:
        if not self.is_offline:
            return self._client.get("/v1/admin/keys", revoked=revoked)
        from modelyard.http.admin.keys import list_keys

        async def read(accounts: Any) -> Json:
            return await list_keys(accounts, time.time(), revoked=revoked)

        return self._in_file(read)

    def create(self, body: Json) -> Json:
        if not self.is_offline:
            return self._client.send("POST", "/v1/admin/keys", body)
        from pydantic import ValidationError

        from modelyard.accounts.settings import NewKey

        try:
            wanted = NewKey.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            raise InvalidRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

        async def make(accounts: Any) -> Json:
            key, secret = await accounts.create(wanted, open_to_all=not accounts.ring.keys)
            return {"id": key.id, "name": key.name, "secret": secret, "warnings": []}

        return self._in_file(make)

    def revoke(self, name: str) -> Json:
        """By name or id."""
        found = [key for key in self.all(revoked=False)["data"] if name in (key["id"], key["name"])]
        if not found:
            raise NotFound(f"there is no key {name!r}; modelyard keys list shows them")
        id = found[0]["id"]
        if not self.is_offline:
            return self._client.send("DELETE", f"/v1/admin/keys/{id}")

        async def revoke(accounts: Any) -> Json:
            key = await accounts.revoke(id, may_open=True)
            return {"id": key.id, "name": key.name}

        return self._in_file(revoke)

    def _in_file(self, work: Any) -> Json:
        from modelyard.server.app import make_accounts

        config = load_or_exit(self._config, quiet=True).config

        async def run() -> Json:
            accounts = make_accounts(config)
            try:
                found: Json = await work(accounts)
                return found
            finally:
                await accounts.close()

        return asyncio.run(run())


@keys_app.command("list")
def list_command(
    revoked: Annotated[bool, typer.Option("--revoked", help="Also the keys that were revoked.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """List the API keys with what they may do and have used."""
    with run_or_exit(KeyManager, url, key, config) as manager:
        found = run_or_exit(manager.all, revoked)
    if as_json:
        print_json(found)
    elif found["data"]:
        columns = ("name", "id", "state", "rights", "models", "limits", "used", "last used", "expires")
        print_table(columns, [tuple(_cells(one, found["currency"])) for one in found["data"]])
    else:
        out.print("there are no keys: everyone on this machine may use the server")


def _cells(key: Json, currency: str) -> Iterator[str]:
    remote = {True: "remote", False: "no remote", None: ""}[key["allow_remote"]]
    yield key["name"]
    yield key["id"]
    yield key["state"]
    yield ", ".join(filter(None, ("" if key["role"] == "member" else key["role"], remote)))
    yield ", ".join(key["models"]) or "all"
    limits = (
        (key["requests_per_minute"], "requests/min"),
        (key["tokens_per_minute"], "tokens/min"),
        (key["max_concurrent"], "at a time"),
        (key["token_budget"], f"tokens/{key['budget_period']}"),
        (key["cost_budget"], f"{currency}/{key['budget_period']}"),
    )
    yield ", ".join(
        f"{value:g} {unit}" if isinstance(value, float) else f"{value} {unit}" for value, unit in limits if value
    )
    used = key["usage"]
    cost = f", {used['cost']:.4g} {currency}" if used["cost"] else ""
    yield f"{used['prompt'] + used['output']} tokens{cost}" if used["requests"] else ""
    yield _time(key["last_used"])
    yield _time(key["expires"])


def _time(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


@keys_app.command()
def create(
    name: Annotated[str, typer.Argument(help="What logs, metrics and usage call the owner of the key.")],
    admin: Annotated[bool, typer.Option("--admin", help="The same as --role operator.")] = False,
    role: Annotated[
        KeyRole | None,
        typer.Option(
            help="Default: member, who uses models. An operator manages models and keys, an owner everything."
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model, cache or route that it may use, or a glob; may be repeated.")
    ] = None,
    allow_remote: Annotated[
        bool | None,
        typer.Option("--allow-remote/--forbid-remote", help="Models that send data elsewhere: always, or never."),
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option("--rpm", min=1, help="Requests per minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option("--tpm", min=1, help="Tokens per minute.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Requests at a time.")] = None,
    token_budget: Annotated[int | None, typer.Option(min=1, help="Tokens in each budget period.")] = None,
    cost_budget: Annotated[float | None, typer.Option(help="Cost in each budget period.")] = None,
    budget_period: Annotated[Literal["day", "month", "total"] | None, typer.Option(help="Default: month.")] = None,
    expires: Annotated[str | None, typer.Option(help="When it stops working: 2026-12-31 or 2026-12-31T18:00Z.")] = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Create an API key. Its secret is printed once, alone on stdout, and stored nowhere.

    Example: [bold]modelyard keys create team-a --model 'qwen*' --token-budget 1000000 --budget-period day[/bold]
    """
    body = {
        "name": name,
        "role": role or ("operator" if admin else "member"),
        "models": model or [],
        "allow_remote": allow_remote,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
        "token_budget": token_budget,
        "cost_budget": cost_budget,
        "expires": expires,
        **({"budget_period": budget_period} if budget_period else {}),
    }
    with run_or_exit(KeyManager, url, key, config) as manager:
        made = run_or_exit(manager.create, body)
    for warning in made["warnings"]:
        err.print(f"[yellow]warning[/yellow] {escape(warning)}", soft_wrap=True)
    if as_json:
        print_json(made)
        return
    when = "; servers read it when they start" if manager.is_offline else ""
    err.print(f"the key {escape(made['name'])!r} was created{when}. It is not shown again:", soft_wrap=True)
    out.print(made["secret"], markup=False, highlight=False, soft_wrap=True)


@keys_app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name or id of a key that was created.")],
    url: UrlOption = None,
    key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Revoke a created key: it is refused from now on, and its running requests end."""
    with run_or_exit(KeyManager, url, key, config) as manager:
        done = run_or_exit(manager.revoke, name)
    out.print(f"the key {escape(done['name'])!r} is revoked", soft_wrap=True)


@keys_app.command()
def cluster(
    file: Annotated[Path, typer.Argument(help="The file to create; everyone who can read it can join the cluster.")],
) -> None:
    """Create the keys with which the members of a cluster authenticate each other and encrypt their messages."""
    from modelyard.workers.transport import generate_keys, write_keys

    run_or_exit(write_keys, file, generate_keys())
    line = f"{file}: copy it to every member, and set workers.keys to its path there."
    out.print(line, markup=False, soft_wrap=True)
