"""`modelyard config`: which files are read, what is in effect and why, and editing the user's own file."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.markup import escape

from modelyard.cli.console import ConfigOption, err, load_or_exit, out, print_problem, run_or_exit
from modelyard.core.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from modelyard.config.effective import EffectiveSetting
    from modelyard.config.problems import ConfigPath

config_app = typer.Typer(
    help="Where settings come from: the files that are read, the values in effect, and the user's own file.",
    no_args_is_help=True,
)

_ROLES = {
    "--config": "named by --config; no other file is read",
    "user": "yours, for every folder",
    "settings": "of this folder, pool style",
    "local": "of this machine, over the one above",
    "project": "of this folder",
}
TEMPLATE = """\
# Modelyard: settings of this user, for every folder.
#
# A project's modelyard.toml (or config/settings.json) overrides them, then come MODELYARD_* variables and the options
# of the command line. Tables are merged key by key; lists are replaced.
#
#   modelyard config show    the settings in effect, and where each comes from
#   modelyard check          models, caches, routes, memory and problems
#   docs/config.md           every setting

# [http]
# port = 8000                 # the address of the server is also where run, chat and ps look for it

# [decoding]
# temperature = 0.7           # for requests that set none

# [models.qwen]
# path = "/models/qwen.gguf"  # a file, a folder, or a name in the library
# n_ctx = 16384
"""


@config_app.command("path")
def path(config: ConfigOption = None) -> None:
    """List the files that are looked for, in the order in which later ones override earlier ones."""
    from modelyard.config.sources import config_files

    for file in config_files(config, os.environ, Path.cwd()):
        state = "missing" if file.state == "read" and not file.path.is_file() else file.state
        about = f"{escape(str(file.path))}  [dim]{escape(file.reason or _ROLES[file.role])}[/dim]"
        out.print(f"[{_COLOURS[state]}]{state:<8}[/] {about}", highlight=False, soft_wrap=True)
    out.print("[dim]then     MODELYARD_* variables, then options of the command line[/dim]")


_COLOURS = {"read": "green", "missing": "red", "absent": "dim", "ignored": "yellow", "unused": "yellow"}


@config_app.command("show")
def show(
    config: ConfigOption = None,
    defaults: Annotated[bool, typer.Option("--all", help="Also the settings that no source sets.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per setting.")] = False,
) -> None:
    """Print the configuration in effect as TOML; a comment says where each value comes from. Secrets are masked."""
    from modelyard.config.effective import effective_settings
    from modelyard.config.problems import format_path

    loaded = load_or_exit(config)
    settings = list(effective_settings(loaded, defaults=defaults))
    if as_json:
        rows = ({"path": format_path(s.path), "value": s.value, "source": s.source} for s in settings)
        lines: Iterable[str] = (msgspec.json.encode(row).decode() for row in rows)
    else:
        lines = settings_as_toml(settings)
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    for problem in loaded.problems:
        print_problem(problem)


def settings_as_toml(settings: Iterable[EffectiveSetting]) -> Iterator[str]:
    """One table per section, values before tables, the sources in a column."""
    top = sorted(settings, key=lambda setting: len(setting.path) > 1)
    for section, group in groupby(top, key=lambda setting: setting.path[:-1]):
        found = [(f"{_key(s.path[-1:])} = {_toml(s.value)}", s.source) for s in group]
        if section:
            yield f"[{_key(section)}]"
        width = max((len(text) for text, _ in found if len(text) <= 60), default=0)
        yield from (f"{text:<{width}}  # {source}" for text, source in found)
        yield ""


def _key(path: ConfigPath) -> str:
    parts = (str(part) for part in path)
    return ".".join(
        p if p.replace("-", "").replace("_", "").isalnum() and p.isascii() else json.dumps(p) for p in parts
    )


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key((k,))} = {_toml(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


@config_app.command("edit")
def edit() -> None:
    """Open your own file in $VISUAL or $EDITOR, and check it afterwards. It is created if there is none."""
    from modelyard.config.load import load_config
    from modelyard.config.problems import ConfigError

    file = run_or_exit(_edited, os.environ)
    try:
        loaded = load_config(file)
    except ConfigError as error:
        for problem in error.problems:
            print_problem(problem)
        err.print(f"[red]{escape(str(file))} cannot be used as it is:[/red] run modelyard config edit again")
        raise typer.Exit(1) from None
    for problem in loaded.problems:
        print_problem(problem)
    out.print(f"{escape(str(file))} is valid. A running server reloads it with [bold]watch = true[/bold] or on SIGHUP.")


def _edited(env: Mapping[str, str]) -> Path:
    from modelyard.config.sources import user_file

    file = user_file(env)
    if file is None:
        raise NotFound("there is no home folder: set HOME or XDG_CONFIG_HOME")
    command = [*shlex.split(find_editor(env)), str(file)]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.touch(mode=0o600)  # it may get API keys
            file.write_text(TEMPLATE, encoding="utf-8")
        code = subprocess.call(command)  # noqa: S603  the user's own editor
    except OSError as error:
        raise Unavailable(f"cannot edit {file} with {command[0]}: {error.strerror}") from None
    if code != 0:
        raise Unavailable(f"{command[0]} ended with exit code {code}; {file} was not checked")
    return file


def find_editor(env: Mapping[str, str]) -> str:
    named = env.get("VISUAL") or env.get("EDITOR")
    usual = ("notepad",) if sys.platform == "win32" else ("nano", "vim", "vi")
    found = named or next((name for name in usual if shutil.which(name, path=env.get("PATH"))), None)
    if found is None:
        raise NotFound("no editor was found: set EDITOR, for example EDITOR=nano")
    return found
