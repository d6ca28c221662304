"""docs/troubleshooting.md, docs/platforms.md and docs/README.md: what they name exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from modelyard.cli.app import app
from tests.docs.pages import DOCS, sections
from tests.live_server import LiveServer, live_server

PACKAGE, PLUGINS = DOCS.parent / "modelyard", DOCS.parent / "plugins"
PAGES = ("README.md", "clients.md", "platforms.md", "troubleshooting.md")


@cache
def source() -> str:
    return "\n".join(path.read_text() for folder in (PACKAGE, PLUGINS) for path in folder.rglob("*.py"))


def codes() -> list[tuple[int, str]]:
    """Status and code of each row of the table of errors."""
    rows = re.findall(
        r"^\| (\d{3})[^|]*\| ([^|]+) \|", sections("troubleshooting.md")["Errors by status"], re.MULTILINE
    )
    return [(int(status), code) for status, cell in rows for code in re.findall(r"`(\w+)`", cell)]


def test_every_code_of_an_error_exists() -> None:
    named = {code for _, code in codes()} | set(re.findall(r"^\| `([a-z]+_[a-z_]+)`", _page(), re.MULTILINE))
    assert len(named) > 25
    assert sorted(code for code in named if f'"{code}"' not in source()) == []


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    small = {"backend": "fake", "script": [{"when": "much", "steps": [{"fail": "later", "kind": "rate_limited"}]}]}
    config: dict[str, Any] = {
        "models": {"small": {**small, "n_ctx": 64}, "idle": {"backend": "fake", "enabled": False}},
        "keys": [{"name": "me", "key": "secret-secret-secret"}],
        "http": {"max_body_bytes": 10_000},
    }
    with live_server(config) as running:
        yield running


def ask(content: str = "Hi", model: str = "small", **more: Any) -> dict[str, Any]:
    return {"json": {"model": model, "messages": [{"role": "user", "content": content}], **more}}


@pytest.mark.parametrize(
    ("code", "request_"),
    [
        ("context_length_exceeded", ask("word " * 200)),
        ("invalid_json", {"content": "{"}),
        ("invalid_api_key", ask() | {"headers": {"authorization": "Bearer wrong"}}),
        ("admin_key_required", {"path": "/v1/admin/models", "method": "GET"}),
        ("model_not_found", ask(model="other")),
        ("path_not_found", ask() | {"path": "/v1/v1/chat/completions"}),
        ("model_not_loaded", ask(model="idle")),
        ("request_too_large", ask("x" * 20_000)),
        ("rate_limit_exceeded", ask("too much")),
    ],
)
def test_the_table_has_the_status_that_the_server_sends(
    served: LiveServer, code: str, request_: dict[str, Any]
) -> None:
    sent = {
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": {"authorization": "Bearer secret-secret-secret"},
    }
    sent |= request_
    reply = httpx.request(sent.pop("method"), served.url + sent.pop("path"), **sent)
    assert reply.json()["error"]["code"] == code
    assert (reply.status_code, code) in codes()


@pytest.mark.parametrize("page", PAGES)
def test_every_command_exists(page: str) -> None:
    group = typer.main.get_command(app)
    commands = re.findall(r"(?:^|[`|] ?)modelyard ([a-z][^`|#\n]*)", (DOCS / page).read_text(), re.MULTILINE)
    assert commands or page == "README.md"
    for line in commands:
        command, context = group, typer.Context(group)
        for word in shlex.split(line):
            found = getattr(command, "commands", {}).get(word)
            if found is not None:
                command = found
            elif word.startswith("-"):
                options = [name for one in command.get_params(context) for name in one.opts + one.secondary_opts]
                assert word.split("=")[0] in options, line
            elif hasattr(command, "commands"):
                raise AssertionError(f"no such command: modelyard {line}")


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([\w./-]*\.md)?(?:#([\w-]+))?\)", (DOCS / page).read_text()):
        linked = DOCS / (target or page)
        assert linked.is_file(), target
        if anchor:
            assert anchor in anchors(linked), f"{target}#{anchor}"


def anchors(page: Path) -> list[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_index_lists_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    assert [page.name for page in DOCS.glob("*.md") if page.name != "README.md" and f"({page.name})" not in index] == []


def _page() -> str:
    return (DOCS / "troubleshooting.md").read_text()
