"""Which files hold the settings, and reading them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelyard.config.layers import Table
from modelyard.config.problems import ConfigError, Problem

SETTINGS_VARIABLE = "LLM_POOL_SETTINGS_PATH"
LOCAL_VARIABLE = "LLM_POOL_LOCAL_SETTINGS_PATH"


def find(path: Path | None, env: Mapping[str, str], cwd: Path) -> list[Path]:
    """The files to read, later ones over earlier ones. Those that were named must exist; the others are looked for.

    1. `path`, alone
    2. the file that LLM_POOL_SETTINGS_PATH names, else config/settings.json; over it the one that
       LLM_POOL_LOCAL_SETTINGS_PATH names, else local.json beside it
    3. modelyard.toml
    """
    if path is not None:
        return [cwd / path.expanduser()]
    named, local = env.get(SETTINGS_VARIABLE), env.get(LOCAL_VARIABLE)
    base = cwd / Path(named or "config/settings.json").expanduser()
    over = cwd / Path(local).expanduser() if local else base.with_name("local.json")
    pool = [file for file, must in ((base, named), (over, local)) if must or file.is_file()]
    return pool or [file for file in [cwd / "modelyard.toml"] if file.is_file()]


def read(path: Path) -> Table:
    """The file's table, or a ConfigError that says what is wrong with it."""
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise _broken(path, "a configuration is a .toml or a .json file")
    try:
        table = parse(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise _broken(path, "there is no such file") from None
    except OSError as error:
        raise _broken(path, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"is not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(table, dict):
        raise _broken(path, f"must hold a table at its top, found {type(table).__name__}")
    return table


_PARSERS: dict[str, Any] = {".toml": tomllib.loads, ".json": json.loads}


def _broken(path: Path, message: str) -> ConfigError:
    return ConfigError([Problem(str(path), "", message)])
