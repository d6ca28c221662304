"""Codex: it speaks Responses only, and takes every setting on its command line."""

from __future__ import annotations

import json
from pathlib import Path

from modelyard.launch.plan import Agent, Facts, Plan

AGENT = Agent(
    title="Codex",
    program="codex",
    package="@openai/codex",
    version="0.166.0",
    source="npm",
    inside="node_modules/.bin/codex",
)

NEEDS = 16_000  # its own prompt takes about 12,000
# It makes room before a tool's result fills nine tenths of the window, but takes four bytes for a token: a result that
# has twice as many must still fit into the last tenth. Of itself it cuts results at 2,500 of its tokens.
_ROOMY = 40_000
_KEY = "CODEX_MODELYARD_KEY"  # not one of our own names: the agent may run modelyard, too


def plan(facts: Facts, home: Path) -> Plan:
    settings: dict[str, str | int] = {
        "model": facts.model,
        "model_provider": "modelyard",
        "model_providers.modelyard.name": "Modelyard",
        "model_providers.modelyard.base_url": facts.v1,
        "model_providers.modelyard.wire_api": "responses",
        "model_providers.modelyard.env_key": _KEY,
        "model_providers.modelyard.stream_idle_timeout_ms": 3_600_000,
    }
    if facts.window is not None:
        settings["model_context_window"] = facts.window
    if facts.window is not None and facts.window < _ROOMY:
        settings["tool_output_token_limit"] = max(500, facts.window // 16)
    arguments = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return Plan(
        arguments=tuple(arguments),
        env={"CODEX_HOME": str(home), _KEY: facts.key},
        initial={home / ".keep": ""},  # it refuses a home that is not there
        notes=_notes(facts),
    )


def _notes(facts: Facts) -> tuple[str, ...]:
    if facts.window is None or facts.window >= NEEDS:
        return ()
    return (
        f"{facts.model} has a window of {facts.window} tokens and Codex needs about {NEEDS} for itself: every request "
        "will be too long. Serve the model with a larger n_ctx, or launch aider, which needs 1,000.",
    )
