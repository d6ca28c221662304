"""Continue's command line: a settings file of its own, in a folder of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modelyard.launch.plan import Agent, Facts, Plan

AGENT = Agent(
    title="Continue",
    program="cn",
    package="@continuedev/cli",
    version="1.5.47",
    source="npm",
    inside="node_modules/.bin/cn",
)

# It takes this for milliseconds in one place and for seconds in another, where a timer holds no more than 2**31 ms.
_PATIENCE = 2_100_000


def plan(facts: Facts, home: Path) -> Plan:
    settings = home / "modelyard.yaml"
    return Plan(
        arguments=("--config", str(settings)),
        env={"CONTINUE_GLOBAL_DIR": str(home), "CONTINUE_CLI_ENABLE_TELEMETRY": "0", "CONTINUE_METRICS_ENABLED": "0"},
        files={settings: json.dumps(_settings(facts), indent=2) + "\n"},  # every JSON is YAML
    )


def _settings(facts: Facts) -> dict[str, Any]:
    model: dict[str, Any] = {
        "name": facts.model,
        "provider": "openai",
        "model": facts.model,
        "apiBase": facts.v1,
        "apiKey": facts.key,
        "roles": ["chat"],
        "capabilities": ["tool_use"],
        "requestOptions": {"timeout": _PATIENCE},
    }
    if facts.window is not None:
        model["contextLength"] = facts.window
        model["defaultCompletionOptions"] = {
            "contextLength": facts.window,
            "maxTokens": min(32_000, facts.window // 4),
        }
    return {"name": "Modelyard", "version": "1.0.0", "schema": "v1", "models": [model]}
