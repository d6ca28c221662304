"""The container file: copied files exist, variables are known, the user is unprivileged. No image is built."""

from __future__ import annotations

import json
import re
from pathlib import Path

from modelyard.config.load import load_config

ROOT = Path(__file__).parent.parent.parent
LINES = re.sub(r"\\\n\s*", "", (ROOT / "deploy" / "Containerfile").read_text()).splitlines()


def arguments_of(word: str) -> list[str]:
    return [line.removeprefix(word + " ") for line in LINES if line.startswith(word + " ")]


def test_all_copied_files_exist_and_are_not_ignored() -> None:
    ignored = (ROOT / ".containerignore").read_text().split()
    copied = [word for line in arguments_of("COPY") if "--from" not in line for word in line.split()[:-1]]
    assert {"modelyard", "pyproject.toml"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists(), name
        assert name not in ignored


def test_it_runs_as_its_own_user_and_stops_on_sigterm() -> None:
    assert arguments_of("USER") == ["modelyard"]
    assert arguments_of("STOPSIGNAL") == ["SIGTERM"]
    assert json.loads(arguments_of("ENTRYPOINT")[0]) + json.loads(arguments_of("CMD")[0]) == ["modelyard", "serve"]


def test_its_environment_variables_are_known_and_contain_no_secret() -> None:
    words = [
        word.partition("=") for line in arguments_of("ENV") for word in line.split() if word.startswith("MODELYARD_")
    ]
    env = {name: value for name, _, value in words}
    assert not any("KEY" in name for name in env)
    assert load_config(env=env, cwd=Path("/")).config.http.host == "0.0.0.0"


def test_its_health_check_is_that_of_the_service() -> None:
    (check,) = arguments_of("HEALTHCHECK")
    assert "/opt/modelyard/health.py" in check
    assert "deploy/systemd/health.py /opt/modelyard/health.py" in arguments_of("COPY")
