"""The shell commands that `--print` shows do in a real shell what the launcher does."""

from __future__ import annotations

import subprocess
from pathlib import Path

from modelyard.launch.plan import LaunchPlan, shell_script


def test_shell_script_sets_variables_writes_files_and_runs_the_program(tmp_path: Path) -> None:
    settings, state = tmp_path / "a folder" / "s.json", tmp_path / "state.json"
    plan = LaunchPlan(
        arguments=("--model", "a b"),
        env={"NAME": "it's $HOME"},
        unset=("SECRET",),
        files={settings: '{"a": "$HOME"}\n'},
        initial_files={state: "first"},
        notes=("It is small.",),
    )
    script = shell_script(plan, "agent", ["-p", "say 'hi'"])
    assert script.startswith("# It is small.\n")
    agent = 'agent() { printf "%s|" "$NAME" "${SECRET-none}" "$@"; }\n'
    env = {"SECRET": "x", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", agent + script], env=env, capture_output=True)
    assert done.stdout.decode() == "it's $HOME|none|--model|a b|-p|say 'hi'|", done.stderr
    assert settings.read_text() == '{"a": "$HOME"}\n'
    assert state.read_text() == "first"

    state.write_text("changed by the agent")
    subprocess.run(["sh", "-c", agent + script], env=env, capture_output=True, check=True)
    assert state.read_text() == "changed by the agent"
