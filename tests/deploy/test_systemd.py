"""The systemd user service: the installed unit, its scripts and its health check."""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from modelyard.config.load import load_config as load_config
from tests.cli_process import DEADLINE, environment
from tests.live_server import demo_config, live_server

ROOT = Path(__file__).parent.parent.parent
SYSTEMD = ROOT / "deploy" / "systemd"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("deploy_health", SYSTEMD / "health.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


health = load()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout as `make install` leaves it, with an environment of links to what runs this test."""
    root = tmp_path / "modelyard"
    shutil.copytree(ROOT / "deploy", root / "deploy")
    (root / ".venv" / "bin").mkdir(parents=True)
    for name, text in {
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "modelyard": f'#!/bin/sh\nexec {sys.executable} -m modelyard "$@"\n',
    }.items():
        script(root / ".venv" / "bin" / name, text)
    return root


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def run(command: list[str | Path], home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """With a systemctl that records its arguments."""
    tools = home / "bin"
    if not tools.exists():
        tools.mkdir(parents=True)
        script(tools / "systemctl", f'#!/bin/sh\necho "$@" >>{home}/systemctl-calls\n')
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    surroundings = environment(HOME=str(home), PATH=path, XDG_RUNTIME_DIR=str(home), **env)
    surroundings.pop("XDG_CONFIG_HOME", None)
    return subprocess.run(
        command, env=surroundings, cwd=home, capture_output=True, text=True, timeout=DEADLINE, check=False
    )


@pytest.fixture
def home(tmp_path: Path, checkout: Path) -> Path:
    """A home folder in which the service was installed."""
    place = tmp_path / "home"
    place.mkdir()
    done = run([checkout / "deploy" / "systemd" / "install.sh"], place)
    assert done.returncode == 0, done.stderr
    return place


def unit(home: Path) -> Path:
    return home / ".config" / "systemd" / "user" / "modelyard.service"


# --- the unit ---------------------------------------------------------------------------------------------------------


def test_the_installed_unit_names_this_checkout_without_placeholders(home: Path, checkout: Path) -> None:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit(home))
    assert set(parser.sections()) == {"Unit", "Service", "Install"}
    service = parser["Service"]
    assert service["ExecStart"] == f"{checkout}/.venv/bin/modelyard serve"
    for line in (service["ExecStart"], service["ExecStartPost"]):
        program, *rest = line.split()
        assert os.access(program, os.X_OK)
        assert all(Path(word).is_file() for word in rest if word.startswith("/"))
    assert (service["Type"], service["KillMode"], service["Restart"]) == ("exec", "mixed", "on-failure")
    assert "@" not in re.sub(r"^#.*$", "", unit(home).read_text(), flags=re.MULTILINE)


def test_systemd_verifies_the_unit(home: Path) -> None:
    """Where systemd is not installed, or cannot look at units, the test above has read it."""
    if shutil.which("systemd-analyze") is None:
        return
    done = run(["systemd-analyze", "verify", "--user", "--man=no", unit(home)], home)
    if "Failed to initialize manager" not in done.stderr:
        assert done.returncode == 0, done.stderr
        assert "modelyard.service" not in done.stderr


# --- its scripts ------------------------------------------------------------------------------------------------------


def test_secrets_are_private_and_survive_a_second_installation(home: Path, checkout: Path) -> None:
    secrets = home / ".config" / "modelyard" / "modelyard.env"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    secrets.write_text("MODELYARD_API_KEY=mine\n")
    assert run([checkout / "deploy" / "systemd" / "install.sh"], home).returncode == 0
    assert secrets.read_text() == "MODELYARD_API_KEY=mine\n"


def test_the_example_of_secrets_has_only_known_variables() -> None:
    lines = (SYSTEMD / "modelyard.env.example").read_text().splitlines()
    names = [line[1:].partition("=")[0] for line in lines if re.match(r"#[A-Z_]+=", line)]
    assert {"MODELYARD_API_KEY", "MODELYARD_ADMIN_KEY"} <= set(names)
    values = {name: "8000" if name.endswith("PORT") else "info" for name in names}
    assert load_config(env=values, cwd=Path("/")).config.http.port == 8000


def test_without_an_environment_nothing_is_installed(home: Path, checkout: Path) -> None:
    (checkout / ".venv" / "bin" / "modelyard").unlink()
    unit(home).unlink()
    done = run([checkout / "deploy" / "systemd" / "install.sh"], home)
    assert done.returncode == 1
    assert "make install" in done.stderr
    assert not unit(home).exists()


def test_stopping_stops_the_service(home: Path, checkout: Path) -> None:
    assert run([checkout / "deploy" / "systemd" / "stop.sh"], home).returncode == 0
    assert (home / "systemctl-calls").read_text().splitlines()[-1] == "--user stop modelyard.service"


def settle(home: Path, port: int, **model: str) -> None:
    fields = "".join(f'{name} = "{value}"\n' for name, value in model.items())
    text = f'[http]\nport = {port}\n[models.demo]\nbackend = "fake"\n{fields}'
    (home / ".config" / "modelyard" / "modelyard.toml").write_text(text)


def test_a_restart_waits_until_the_service_answers(home: Path, checkout: Path) -> None:
    with live_server(demo_config()) as served:
        settle(home, int(served.url.rpartition(":")[2]))
        done = run([checkout / "deploy" / "systemd" / "restart.sh"], home)
    assert done.returncode == 0, done.stderr
    assert (home / "systemctl-calls").read_text().splitlines()[-1] == "--user restart modelyard.service"
    assert "it answers; models: demo" in done.stdout


def test_broken_settings_leave_the_running_service_alone(home: Path, checkout: Path) -> None:
    settle(home, 8000, nonsense="yes")
    done = run([checkout / "deploy" / "systemd" / "restart.sh"], home)
    assert done.returncode == 1
    assert "left as it is" in done.stderr
    assert "restart" not in (home / "systemctl-calls").read_text()


# --- the health check -------------------------------------------------------------------------------------------------


def settings(port: int, **more: str) -> object:
    return load_config(env={}, cwd=Path("/"), overrides={"http": {"port": port, **more}}).config.http


def test_a_responding_server_is_healthy() -> None:
    with live_server(demo_config()) as served:
        port = int(served.url.rpartition(":")[2])
        assert health.ask(settings(port), {}) == "it answers; models: demo"
        assert health.wait(settings(port), {}, 0) == "it answers; models: demo"


def test_a_server_with_keys_is_healthy() -> None:
    with live_server(demo_config(), env={"MODELYARD_API_KEY": "secret"}) as served:
        here = settings(int(served.url.rpartition(":")[2]))
        assert "wants a key" in health.ask(here, {})
        assert health.ask(here, {"MODELYARD_API_KEY": "secret"}) == "it answers; models: demo"


def test_an_unreachable_server_is_unhealthy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with live_server(demo_config()) as served:
        port = int(served.url.rpartition(":")[2])
    with pytest.raises(health.Silent, match=f"127.0.0.1:{port} does not answer"):
        health.wait(settings(port), {}, 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODELYARD_HTTP_PORT", str(port))
    assert health.main([]) == 1
    assert "does not answer" in capsys.readouterr().err
