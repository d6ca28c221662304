"""The command line, most of it in this process with the runner of Typer."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from click.testing import Result
from msgspec.structs import replace
from rich.console import Console
from typer.testing import CliRunner

import modelyard_fake
from modelyard import __version__
from modelyard.cli import app, console
from modelyard.config.load import load_config
from modelyard.core.errors import Unavailable
from modelyard.http.settings import HttpSettings
from modelyard.library import default_model
from modelyard.server.running_servers import announced
from modelyard.server.serve import needs_scheduler
from tests.library.convert.tiny_models import write_model
from tests.library.files import write_gguf

CONFIGS = Path(__file__).parents[2] / "configs"
DEMO = ("--config", str(CONFIGS / "demo.toml"))
BROKEN = """
[http]
prot = 8001
keepalive_s = "soon"

[models.demo]
backend = "fakee"

[[routes]]
match = "*"
cache = "mian"

[caches.main]
model = "demo"
"""


@pytest.fixture(autouse=True)
def _separate_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, with no settings in the environment, on a wide screen; the tests' own logging stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    for name in (
        "MODELYARD_LIBRARY",
        "MODELYARD_URL",
        "MODELYARD_API_KEY",
        "LLM_POOL_SETTINGS_PATH",
        "LLM_POOL_LOCAL_SETTINGS_PATH",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("modelyard.server.serve.log.setup", lambda settings: None)
    for printer in (console.out, console.err):
        monkeypatch.setattr(printer, "_width", 200)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app.app, arguments)


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app.app)))


def test_the_documented_commands_exist():
    assert set(COMMANDS) >= {
        (),
        ("serve",),
        ("check",),
        ("schema",),
        ("models",),
        ("models", "add"),
        ("models", "convert"),
        ("models", "list"),
        ("models", "remove"),
        ("models", "show"),
        ("chat",),
        ("parse",),
    }


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_every_command_and_every_option_has_help(path: tuple[str, ...]):
    command = COMMANDS[path]
    shown = invoke(*path, "--help")
    assert shown.exit_code == 0
    texts = [command.help, *(getattr(parameter, "help", "") for parameter in command.params)]
    assert all(text and text[0].isupper() and text.rstrip()[-1] in ".]" for text in texts), texts
    for parameter in command.params:
        assert max(parameter.opts, key=len) in shown.stdout


def test_the_version_is_printed_alone():
    shown = invoke("--version")
    assert (shown.exit_code, shown.stdout) == (0, f"{__version__}\n")


def test_no_arguments_print_the_help():
    assert "serve" in invoke().output


def test_an_unknown_command_is_a_usage_error():
    shown = invoke("sevre")
    assert shown.exit_code == 2
    assert "sevre" in shown.stderr


# --- check ------------------------------------------------------------------------------------------------------------


def test_check_shows_the_effective_configuration():
    shown = invoke("check", "--config", str(CONFIGS / "demo.toml"))
    rows = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert shown.exit_code == 0
    assert "demo fake gpt-demo at start Scripted answers" in rows
    assert "fast demo 4096 8 32768 strict Background tasks" in rows
    assert "*haiku* | *mini* * demo fast 4096" in rows
    assert "* * demo main 8192" in rows
    assert shown.stderr == ""


def test_check_takes_the_file_with_and_without_its_option():
    file = str(CONFIGS / "demo.toml")
    shown, named = (invoke("check", *way).stdout.splitlines() for way in ([file], ["--config", file]))
    assert shown[:-1] == named[:-1]
    assert shown[-1].startswith("free now: "), "what is free may change between the two"
    both = invoke("check", file, "--config", file)
    assert both.exit_code == 2
    assert "either FILE or --config FILE" in " ".join(both.stderr.split())


def test_check_without_a_file_shows_the_default_and_fetches_nothing():
    shown = invoke("check")
    assert shown.exit_code == 0
    assert "embedded default" in shown.stdout
    assert "smollm2" in shown.stdout
    assert "warning" not in shown.stderr
    assert not Path("cache/models/smollm2").exists()


@pytest.mark.parametrize("file", sorted(CONFIGS.iterdir()), ids=lambda file: file.name)
def test_the_examples_have_no_problem_but_an_absent_model_file(file: Path):
    shown = invoke("check", "--config", str(file))
    lines = shown.stderr.splitlines()
    assert all("there is no model file" in line for line in lines), shown.stderr
    assert shown.exit_code == (1 if lines else 0)


def test_check_lists_all_problems_with_suggestions(tmp_path: Path):
    (tmp_path / "modelyard.toml").write_text(BROKEN)
    shown = invoke("check")
    assert shown.exit_code == 1
    assert shown.stdout == ""
    *lines, count = shown.stderr.splitlines()
    for line, words in zip(
        lines,
        ("3: http.prot", "4: http.keepalive_s", "7: models.demo.backend", "11: routes[0]", "13: caches.main.n_ctx"),
        strict=True,
    ):
        assert line.startswith("error")
        assert f"modelyard.toml:{words}" in line
    assert count == "5 errors"
    assert "'port'" in lines[0]
    assert "'fake'" in lines[2]
    assert "'main'" in lines[3]


def test_check_with_a_missing_engine_exits_with_one_and_shows_the_routes(tmp_path: Path):
    (tmp_path / "modelyard.toml").write_text('[models.big]\nbackend = "fake"\n[models.other]\nbackend = "warp_drive"\n')
    shown = invoke("check")
    assert shown.exit_code == 1
    assert "warp_drive" in shown.stderr
    assert "big" in shown.stdout


def test_check_reports_an_engine_whose_library_does_not_work(monkeypatch: pytest.MonkeyPatch):
    def broken() -> None:
        raise Unavailable("the library died by SIGILL; `make rebuild-engine` builds it anew")

    monkeypatch.setattr("modelyard.engines.llama_cpp.selftest.require_working_library", broken)
    write_gguf(Path("tiny.gguf"))
    Path("modelyard.toml").write_text('[models.tiny]\npath = "tiny.gguf"\n')
    shown = invoke("check")
    assert shown.exit_code == 1
    assert "modelyard.toml:1: models.tiny.backend: the library died by SIGILL" in shown.stderr
    assert "tiny" in shown.stdout


def test_a_missing_file_is_one_sentence(tmp_path: Path):
    shown = invoke("check", "--config", "nowhere.toml")
    assert shown.exit_code == 1
    assert "nowhere.toml" in shown.stderr
    assert shown.stderr.count("\n") == 1


def test_variables_of_the_chat_are_not_settings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MODELYARD_URL", "http://127.0.0.1:9")
    assert invoke("check").exit_code == 0


# --- schema -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads(CliRunner().invoke(app.app, ["schema"]).stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("file", sorted(CONFIGS.iterdir()), ids=lambda file: file.name)
def test_every_example_matches_the_printed_schema(validator: Any, file: Path):
    text = file.read_text()
    validator.validate(tomllib.loads(text) if file.suffix == ".toml" else json.loads(text))


@pytest.mark.parametrize(
    "broken", [{"http": {"prot": 1}}, {"htpp": {}}, {"http": {"port": "x"}}, {"caches": {"a": {}}}]
)
def test_the_printed_schema_refuses_invalid_configurations(validator: Any, broken: dict[str, Any]):
    assert not validator.is_valid(broken)


# --- models -----------------------------------------------------------------------------------------------------------


def test_models_list_shows_engine_aliases_and_description():
    shown = invoke("models", "list", "--config", str(CONFIGS / "demo.toml"))
    assert shown.exit_code == 0
    assert "demo fake at start 8 × 8192, 8 × 4096 also gpt-demo; Scripted answers" in " ".join(shown.stdout.split())
    assert "library" not in shown.stdout


def test_models_list_marks_the_default_as_not_downloaded():
    shown = " ".join(invoke("models", "list").stdout.split())
    assert "smollm2 llama_cpp at start 94 MiB" in shown
    assert "not fetched yet; A demo that runs anywhere; for real work: modelyard start" in shown


def test_a_table_never_cuts_a_name_and_wraps_only_its_last_column(monkeypatch: pytest.MonkeyPatch):
    name, note = "Qwen3-Coder-30B-A3B-Instruct-UD-Q4_K_XL", "this machine has too little memory for it"
    for terminal, lines in ((True, 4), (False, 2)):
        shown = Console(width=60, force_terminal=terminal, no_color=True, file=io.StringIO())
        monkeypatch.setattr(console, "out", shown)
        console.print_table(("model", "aliases", "size", ""), [(name, "", "16.5 GiB", note)])
        text = shown.file.getvalue()  # type: ignore[attr-defined]
        assert (name in text, "aliases" in text, text.count("\n")) == (True, False, lines)
        assert " ".join(text.split()).replace("\x1b[1m", "").replace("\x1b[0m", "").endswith(note)


def test_models_show_marks_the_default_as_not_downloaded():
    shown = invoke("models", "show", "smollm2")
    assert shown.exit_code == 0
    assert "not fetched yet (94 MiB): modelyard serve fetches it at start" in shown.stdout


def test_a_model_is_added_listed_shown_and_removed(tmp_path: Path):
    write_gguf(tmp_path / "tiny.Q4_K_M.gguf")
    added = invoke("models", "add", "tiny.Q4_K_M.gguf", "--name", "tiny")
    assert added.exit_code == 0
    assert added.stdout == "tiny is in the library. Try it: modelyard run tiny\n"
    listed = " ".join(invoke("models", "list").stdout.split())
    assert "tiny llama_cpp 424 B Q4_K_M" in listed
    assert "no chat template: bare prompts only" in listed
    shown = invoke("models", "show", "tiny").stdout
    assert all(word in shown for word in ("toy, 2 layers", "600", "Q4_K_M", "512 tokens"))
    result = CliRunner().invoke(app.app, ["models", "remove", "tiny"], input="n\n")
    assert (result.exit_code, "the file stays" in result.stderr) == (1, True)
    assert invoke("models", "remove", "tiny", "--yes").exit_code == 0
    assert "tiny" not in invoke("models", "list").stdout
    assert (tmp_path / "tiny.Q4_K_M.gguf").exists()


def test_a_model_is_converted_into_the_library(tmp_path: Path):
    write_model(tmp_path / "tiny.gguf")
    made = invoke("models", "convert", "tiny.gguf", "--to", "ct2")
    assert made.exit_code == 0
    assert "100 %" in made.stderr
    assert "[models.tiny-ct2]" in made.stdout
    assert "tiny-ct2 ct2" in " ".join(invoke("models", "list").stdout.split())
    for code, *wrong in ((2, "tiny.gguf", "--to", "onnx"), (1, "nobody", "--to", "hf")):
        shown = invoke("models", "convert", *map(str, wrong))
        assert (shown.exit_code, shown.stderr.count("\n")) == (code, 1)


def test_an_interrupted_pull_says_that_it_can_be_continued(monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("modelyard.library.models.pull", interrupted)
    stopped = invoke("pull", "owner/repo")
    assert stopped.exit_code == 130
    assert stopped.stderr == "stopped; what has arrived is kept, and the same command continues there\n"


def test_add_and_remove_errors_are_one_sentence(tmp_path: Path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUX")
    for command in (("add", "nowhere at all"), ("add", "broken.gguf"), ("remove", "nobody", "--yes")):
        shown = invoke("models", *command)
        assert shown.exit_code == (2 if "broken.gguf" in command else 1)
        assert shown.stderr.startswith("error ")
        assert shown.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["demo", "gpt-demo"])
def test_models_show_explains_the_origin_of_every_part(name: str):
    shown = invoke("models", "show", name, "--config", str(CONFIGS / "demo.toml"))
    rows = {line.split()[0] for line in shown.stdout.splitlines()}
    assert shown.exit_code == 0
    assert {"model", "engine", "cache", "tokenizer", "template", "format"} <= rows
    assert "8 × 8192 tokens Conversations" in shown.stdout


def test_an_unknown_model_is_an_error_that_lists_the_known_models():
    shown = invoke("models", "show", "demmo", "--config", str(CONFIGS / "demo.toml"))
    assert shown.exit_code == 1
    assert shown.stderr == "error no model 'demmo'; there are demo, gpt-demo\n"


# --- serve, as far as it does not serve -------------------------------------------------------------------------------


def test_serve_with_an_invalid_file_lists_every_problem_and_does_not_start(tmp_path: Path):
    (tmp_path / "modelyard.toml").write_text(BROKEN)
    shown = invoke("serve")
    assert shown.exit_code == 2
    assert "'port'" in shown.stderr
    assert "'main'" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_serve_on_a_taken_port_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shown = invoke("serve", "--port", str(port), *DEMO)
    assert shown.exit_code == 2
    assert shown.stderr.splitlines()[-1] == (
        f"error port {port} on 127.0.0.1 is in use by another program: stop it, or choose another with --port"
    )


def test_serve_on_the_port_of_another_modelyard_says_so_before_it_loads_anything(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("modelyard.server.serve.prepare", lambda *_: pytest.fail("it prepared a second server"))
    settings = HttpSettings(port=18_321)
    with announced(settings, 18_321):
        shown = invoke("serve", "--port", "18321", *DEMO)
    assert shown.exit_code == 2
    assert f"Modelyard runs already at http://127.0.0.1:18321 (process {os.getpid()})" in shown.stderr
    assert "modelyard stop --server" in shown.stderr


def test_help_shows_types_of_values_and_none_for_flags():
    for command in ((), ("serve",), ("models", "list"), ("keys", "create"), ("config", "show")):
        shown = invoke(*command, "--help")
        assert shown.exit_code == 0
        assert "<bool>" not in shown.stdout
    assert "<path>" in invoke("serve", "--help").stdout


def test_the_version_needs_no_command_to_be_imported():
    code = "import sys; sys.argv[1:] = ['--version']; import modelyard.cli as c; c.main(); print('rich' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == [__version__, "False"]


def test_check_and_the_lists_of_models_are_also_json():
    checked = json.loads(invoke("check", "--json", *DEMO).stdout)
    assert [model["id"] for model in checked["models"]] == ["demo"]
    assert checked["caches"][0] == {"id": "main", "model": "demo", "window": 8192, "parallel": 8}
    assert {route["model"] for route in checked["routes"]} == {"demo"}
    listed = {model["id"]: model for model in json.loads(invoke("models", "list", "--json", *DEMO).stdout)}
    assert listed["demo"]["caches"][0]["window"] == 8192
    assert json.loads(invoke("models", "show", "demo", "--json", *DEMO).stdout)["engine"] == "fake"


def test_check_as_json_tells_every_error_and_fails(tmp_path: Path):
    file = tmp_path / "broken.toml"
    file.write_text(BROKEN)
    shown = invoke("check", "--json", str(file))
    assert shown.exit_code == 1
    assert {"error"} <= {problem["level"] for problem in json.loads(shown.stdout)["problems"]}


@pytest.mark.parametrize("workers", ["1", "2"])
def test_serve_on_a_public_address_without_a_key_is_refused(workers: str):
    shown = invoke("serve", "--host", "0.0.0.0", "--port", "0", "--workers", workers)
    assert shown.exit_code == 2
    assert "without an API key" in shown.stderr
    assert "MODELYARD_API_KEY" in shown.stderr


def test_an_invalid_port_is_a_usage_error():
    shown = invoke("serve", "--port", "99999")
    assert shown.exit_code == 2
    assert "command line" in shown.stderr
    assert "65535" in shown.stderr


def test_several_gateways_share_a_scheduler_if_weights_or_limits_are_shared(monkeypatch: pytest.MonkeyPatch):
    demo = load_config(Path(DEMO[1]), env={}).config
    assert not needs_scheduler(demo)
    limited = load_config(
        Path(DEMO[1]), env={}, overrides={"keys": [{"name": "k", "key": "x" * 20, "max_concurrent": 1}]}
    )
    assert needs_scheduler(limited.config)
    fake = modelyard_fake
    monkeypatch.setattr(fake, "ENGINE", replace(fake.ENGINE, holds_weights=True))
    assert needs_scheduler(demo)


def test_keys_are_created_once(tmp_path: Path):
    file = tmp_path / "cluster.keys"
    assert invoke("keys", "cluster", str(file)).exit_code == 0
    again = invoke("keys", "cluster", str(file))
    assert again.exit_code == 2
    assert "exists already" in again.stderr


def test_a_public_address_is_refused_without_keys():
    for command in (("scheduler", "--listen", "tcp://0.0.0.0:1"), ("worker", "--scheduler", "tcp://192.0.2.1:1")):
        shown = invoke(*command, *DEMO)
        assert shown.exit_code == 2
        assert "modelyard keys" in shown.stderr


def broken_setup(progress: object = None) -> None:
    raise Unavailable("llama.cpp could not be fetched: offline")


def test_serve_without_a_library_that_can_be_set_up_fails_with_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("modelyard.engines.llama_cpp.setup.ensure_library", broken_setup)
    shown = invoke("serve", "--port", "0")
    assert (shown.exit_code, shown.stderr) == (1, "error llama.cpp could not be fetched: offline\n")


def test_serve_without_llama_cpp_still_serves_other_models(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("modelyard.engines.llama_cpp.setup.ensure_library", broken_setup)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        shown = invoke("serve", "--port", str(taken.getsockname()[1]), *DEMO)
    assert "is in use by another program" in shown.stderr, "it came as far as listening"


def test_serve_downloads_the_default_model_before_it_listens(monkeypatch: pytest.MonkeyPatch):
    def fetch(meter: Any) -> Path:
        raise Unavailable("no network")

    monkeypatch.setattr(default_model, "fetch", fetch)
    shown = invoke("serve", "--port", "0")
    assert (shown.exit_code, shown.stderr) == (1, "error no network\n")
