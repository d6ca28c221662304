"""aider: variables for the address, and a file that tells it how large the window is."""

from __future__ import annotations

import json
from pathlib import Path

from modelyard.launch.plan import Agent, Facts, Plan

AGENT = Agent(
    title="aider",
    program="aider",
    package="aider-chat",
    version="0.86.2",
    source="PyPI",
    inside="bin/aider",
)


def plan(facts: Facts, home: Path) -> Plan:
    name = f"openai/{facts.model}"
    arguments = ["--model", name, "--weak-model", f"openai/{facts.aside}", "--timeout", "3600"]
    arguments += ["--no-show-model-warnings", "--no-check-update", "--no-show-release-notes"]
    files: dict[Path, str] = {}
    if facts.window is not None:
        known = home / "models.json"
        # The other name, too: for one that it does not know it asks the internet.
        both = dict.fromkeys((name, f"openai/{facts.aside}"), _model(facts.window))
        files[known] = json.dumps(both, indent=2) + "\n"
        arguments += ["--model-metadata-file", str(known)]
    return Plan(
        arguments=tuple(arguments),
        env={"OPENAI_API_BASE": facts.v1, "OPENAI_API_KEY": facts.key, "AIDER_ANALYTICS": "false"},
        files=files,
    )


def _model(window: int) -> dict[str, object]:
    output = min(32_000, window // 4)
    return {
        "max_input_tokens": window,
        "max_tokens": output,
        "max_output_tokens": output,
        "litellm_provider": "openai",
        "mode": "chat",
    }
