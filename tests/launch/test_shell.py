"""The lines that `--print` shows do in a real shell what the launcher does by itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

from modelyard.launch import shell
from modelyard.launch.plan import Plan


def test_the_lines_set_write_unset_and_run(tmp_path: Path) -> None:
    settings, state = tmp_path / "a folder" / "s.json", tmp_path / "state.json"
    plan = Plan(
        arguments=("--model", "a b"),
        env={"NAME": "it's $HOME"},
        unset=("SECRET",),
        files={settings: '{"a": "$HOME"}\n'},
        initial={state: "first"},
        notes=("It is small.",),
    )
    text = shell.lines(plan, "agent", ["-p", "say 'hi'"])
    assert text.startswith("# It is small.\n")
    show = 'agent() { printf "%s|" "$NAME" "${SECRET-none}" "$@"; }\n'
    done = subprocess.run(["sh", "-c", show + text], env={"SECRET": "x", "PATH": "/usr/bin:/bin"}, capture_output=True)
    assert done.stdout.decode() == "it's $HOME|none|--model|a b|-p|say 'hi'|", done.stderr
    assert settings.read_text() == '{"a": "$HOME"}\n'
    assert state.read_text() == "first"

    state.write_text("changed by the agent")
    subprocess.run(["sh", "-c", show + text], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True)
    assert state.read_text() == "changed by the agent"
