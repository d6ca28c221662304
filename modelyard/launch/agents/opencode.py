"""opencode: a provider of its own in settings that are laid over the user's for this run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modelyard.launch.plan import Agent, Facts, Plan

AGENT = Agent(
    title="opencode",
    program="opencode",
    package="opencode-ai",
    version="1.18.33",
    source="npm",
    inside="node_modules/opencode-{platform}/bin/opencode",
)

NEEDS = 12_000  # its own prompt takes about 8,000


def plan(facts: Facts, home: Path) -> Plan:
    del home  # nothing of its own has to be written
    return Plan(
        env={
            "OPENCODE_CONFIG_CONTENT": json.dumps(_settings(facts)),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        },
        notes=_notes(facts),
    )


def _settings(facts: Facts) -> dict[str, Any]:
    models = {name: _model(facts) for name in dict.fromkeys((facts.model, facts.aside))}
    options = {"baseURL": facts.v1, "apiKey": facts.key, "timeout": False}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Modelyard", "options": options, "models": models}
    return {
        "$schema": "https://opencode.ai/config.json",
        "model": f"modelyard/{facts.model}",
        "small_model": f"modelyard/{facts.aside}",
        "provider": {"modelyard": provider},
        # Where its own prompt does not fit, a summary never helps, and it would make one after another for ever.
        **({"compaction": {"auto": False}} if _is_too_small(facts) else {}),
    }


def _model(facts: Facts) -> dict[str, Any]:
    if facts.window is None:
        return {}
    return {"limit": {"context": facts.window, "output": min(32_000, facts.window // 4)}}


def _is_too_small(facts: Facts) -> bool:
    return facts.window is not None and facts.window < NEEDS


def _notes(facts: Facts) -> tuple[str, ...]:
    if not _is_too_small(facts):
        return ()
    return (
        f"{facts.model} has a window of {facts.window} tokens and opencode needs about {NEEDS}: its requests may be "
        "too long. Serve the model with a larger n_ctx, or launch aider, which needs 1,000.",
    )
