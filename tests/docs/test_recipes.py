"""docs/clients.md: the programs of the frameworks. `make test-recipes` installs the frameworks and runs the programs
unchanged against configs/recipes.toml; the other tests compare the page with setup/recipes.py."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from setup import recipes
from tests.cli_process import ROOT
from tests.docs.pages import DOCS, blocks_of, sections
from tests.docs.recipe_programs import DEADLINE, environment_of, link_modules, wait_for
from tests.launch.test_launch import free_port
from tests.live_server import LiveServer, live_server

ANSWER = "Yes: it is sunny in Rome, take a hat."
HARMLESS = ("ignores temperature",)  # the scripted engine has no sampling


NAMES = sorted(recipes.RECIPES)
PROGRAMS = [name for name in NAMES if name != "open-webui"]


# --- the page and the script agree ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_section_names_the_packages_and_the_switches(name: str) -> None:
    recipe = recipes.RECIPES[name]
    text = sections("clients.md")[recipe.title]
    (install,) = blocks_of(text, "console")
    words = install.replace('"', "").split()
    assert words[:2] == ["npm" if recipe.npm else "pip", "install"]
    assert sorted(words[2:]) == sorted(recipe.names)
    assert [switch for switch in recipe.switches if switch not in text] == []


def test_the_table_shows_the_tested_versions() -> None:
    page = (DOCS / "clients.md").read_text()
    shown = dict(re.findall(r"^\| \[([^]]+)\]\(#[\w-]+\) \| .* \| ([^|]+) \|$", page, re.MULTILINE))
    assert {recipe.title: shown.get(recipe.title) for recipe in recipes.RECIPES.values()} == {
        recipe.title: recipe.versions for recipe in recipes.RECIPES.values()
    }


# --- the programs -----------------------------------------------------------------------------------------------------


class RequestLog(logging.Handler):
    """What the server says while a program runs: its warnings, and the requests that it refused."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.requests: list[str] = []
        self.problems: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.name == "modelyard.http":
            fields = getattr(record, "fields", {})
            self.requests.append(f"{fields['path']} {fields['status']}")
            if fields["status"] >= 400:
                self.problems.append(self.requests[-1])
        elif record.levelno > logging.INFO or (message.startswith("request:") and not message.endswith(HARMLESS)):
            self.problems.append(message)


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    with live_server(tomllib.loads((ROOT / "configs" / "recipes.toml").read_text())) as running:
        yield running


@pytest.fixture
def requests() -> Iterator[RequestLog]:
    found, logger = RequestLog(), logging.getLogger("modelyard")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(found)
    yield found
    logger.removeHandler(found)
    logger.setLevel(before)


def program_of(name: str, folder: Path, url: str) -> list[str]:
    (code,) = blocks_of(sections("clients.md")[recipes.RECIPES[name].title], "python", "bash", "js")
    is_js = bool(recipes.RECIPES[name].npm)
    suffix, runner = (".mjs", "node") if is_js else {"llm": (".sh", "bash")}.get(name, (".py", "python"))
    path = folder / f"program{suffix}"
    path.write_text(code.replace("http://localhost:8000", url))
    link_modules(name, folder)
    return [runner, *(["-e"] if runner == "bash" else []), str(path)]


@pytest.mark.recipes
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_works(name: str, served: LiveServer, requests: RequestLog, tmp_path: Path) -> None:
    env, command = environment_of(name, tmp_path), program_of(name, tmp_path, served.url)
    done = subprocess.run(
        ["env", *command],  # finds the program in the PATH of `env`
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done
    code = Path(command[-1]).read_text()
    assert ("get_weather" in code) == (ANSWER in done.stdout), done.stdout
    assert ('"Hello"' in code) == ("Hello there." in done.stdout), done.stdout
    if "Person" in code or "schema" in code:
        assert re.search(r"""name['"]?[=:] ?['"]text['"]""", done.stdout), done.stdout
    assert requests.requests
    assert requests.problems == []


@pytest.mark.recipes
@pytest.mark.parametrize(("provider", "path"), [("ollama_chat", ""), ("gemini", "/v1beta")])
def test_litellm_speaks_the_other_protocols(
    provider: str, path: str, served: LiveServer, requests: RequestLog, tmp_path: Path
) -> None:
    env, command = environment_of("litellm", tmp_path), program_of("litellm", tmp_path, served.url)
    program = Path(command[-1])
    code = program.read_text().replace("openai/", f"{provider}/").replace(f"{served.url}/v1", served.url + path)
    program.write_text(code)
    done = subprocess.run(
        ["env", *command],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done
    assert "Hello there." in done.stdout
    assert ANSWER in done.stdout
    expected = "/api/chat" if provider == "ollama_chat" else "/v1beta/models/my-model:"
    assert all(line.startswith((expected, "/api/show")) for line in requests.requests)
    assert requests.problems == []


@pytest.mark.recipes
@pytest.mark.parametrize("api", ["openai", "ollama"])
def test_open_webui_lists_models_and_chats(api: str, served: LiveServer, requests: RequestLog, tmp_path: Path) -> None:
    start, use = blocks_of(sections("clients.md")["Open WebUI"], "bash")
    if api == "ollama":
        start = start.replace("ENABLE_OLLAMA_API=false", "ENABLE_OLLAMA_API=true ENABLE_OPENAI_API=false")
        start = start.replace("OPENAI_API_BASE_URL=http://localhost:8000/v1", "OLLAMA_BASE_URL=http://localhost:8000")
        use = use.replace("my-model", "my-model:latest")
    env, port = environment_of("open-webui", tmp_path), free_port()
    start = start.replace("http://localhost:8000", served.url).replace("--port 8080", f"--port {port}")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", start], cwd=tmp_path, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, tmp_path / "log")
        done = subprocess.run(
            ["bash", "-c", use.replace("localhost:8080", f"127.0.0.1:{port}")],
            env=env,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=True,
        )
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert f'"id":"my-model{"" if api == "openai" else ":latest"}"' in done.stdout, done
    assert '"content":"Hello there."' in done.stdout, done
    lists, chats = ("/v1/models", "/v1/chat/completions") if api == "openai" else ("/api/tags", "/api/chat")
    assert f"{lists} 200" in requests.requests
    assert f"{chats} 200" in requests.requests
    assert requests.problems == []
