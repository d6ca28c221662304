"""Claude Code: all of it is set by variables; below its smallest window it can only run in its bare mode."""

from __future__ import annotations

import json
from pathlib import Path

from modelyard.launch.plan import Agent, Facts, Plan

AGENT = Agent(
    title="Claude Code",
    program="claude",
    package="@anthropic-ai/claude-code",
    version="2.1.325",
    source="npm",
    inside="node_modules/@anthropic-ai/claude-code-{platform}/claude",
)

# Its full prompt takes 11,000 to 16,000 tokens, and it sums up as soon as less than 13,000 and its longest answer are
# left: below this it would do nothing else.
FULL = 36_000
COMFORTABLE = 64_000
_TIERS = ("OPUS", "SONNET", "FABLE")


def plan(facts: Facts, home: Path) -> Plan:
    small = facts.window is not None and facts.window < FULL
    return Plan(
        arguments=("--model", facts.model, *(("--bare",) if small else ())),
        env=_environment(facts, home),
        unset=("ANTHROPIC_API_KEY",),  # a real one would be sent to the local server beside the token
        initial={home / ".claude.json": json.dumps({"hasCompletedOnboarding": True, "theme": "dark"})},
        notes=_notes(facts),
    )


def _environment(facts: Facts, home: Path) -> dict[str, str]:
    env = {
        "CLAUDE_CONFIG_DIR": str(home),
        "ANTHROPIC_BASE_URL": facts.url,
        "ANTHROPIC_AUTH_TOKEN": facts.key,
        **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": facts.model for tier in _TIERS},
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": facts.aside,
        "API_TIMEOUT_MS": "3600000",  # a long prompt on a CPU takes longer than its ten minutes
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes from session to session, and the cached prompt with it
    }
    if facts.window is not None:
        env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(facts.window)
        env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(min(32_000, max(1024, facts.window // 8)))
    return env


def _notes(facts: Facts) -> tuple[str, ...]:
    if facts.window is None or facts.window >= COMFORTABLE:
        return ()
    told = f"{facts.model} has a window of {facts.window} tokens"
    if facts.window < FULL:
        return (f"{told}; Claude Code needs about {FULL}, so it starts in its bare mode, with three tools.",)
    return (f"{told}; Claude Code works with it, but makes summaries often: {COMFORTABLE} are better.",)
