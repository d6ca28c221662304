"""Sessions of real coding agents with scripted responses: six turns with tools each, as rules and command lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

Rule = dict[str, Any]
_LINES, _FILES = 24, 6


class AgentSession(Struct, frozen=True):
    """`runs` are the agent's own arguments, one run after another; `{session}` in a later one is the session of the
    first. `rules` makes the script for a work folder."""

    name: str
    agent: str
    rules: Callable[[Path], list[Rule]]
    runs: tuple[tuple[str, ...], ...]
    env: Mapping[str, str] = {}


def write_files(work: Path) -> None:
    """The files that the agents read."""
    for number in range(_FILES):
        lines = (f"line {at} of file {number}: the quick brown fox jumps over the lazy dog" for at in range(_LINES))
        (work / f"f{number}.txt").write_text("\n".join(lines) + "\n")


def tool_step(number: int, call: Mapping[str, Any], **conditions: str) -> Rule:
    return {
        **conditions,
        "steps": [
            {"think": f"Step {number}: the next thing to look at is file {number}."},
            {"text": f"I will look into file {number}.\n"},
            {"call": call},
        ],
    }


def final_step(text: str, **conditions: str) -> Rule:
    return {**conditions, "steps": [{"think": "That was the last one."}, {"text": text}]}


def chain(calls: Sequence[Mapping[str, Any]], when: str, first: int = 0, then: Rule | None = None) -> list[Rule]:
    """Calls in sequence, each after the result of the previous one. Newer results are matched first."""
    begin, *rest = calls
    later = [tool_step(n, call, result=f"of file {n - 1}:") for n, call in enumerate(rest, first + 1)]
    final = then or final_step("All is read.", result=f"of file {first + len(calls) - 1}:")
    return [final, *reversed(later), tool_step(first, begin, when=when)]


_TITLE = {"when": "(?i)generate a title", "steps": [{"text": "A title"}]}
_GO, _MORE = "read all the files", "now read the rest"


# --- Claude Code ------------------------------------------------------------------------------------------------------

_CLAUDE = ("--dangerously-skip-permissions", "--output-format", "json")


def _bash(number: int) -> dict[str, Any]:
    """With an order of keys and a number format that this client never sends back."""
    arguments = {"description": f"Show file {number}", "timeout": 5000.0, "command": f"cat f{number}.txt"}
    return {"name": "Bash", "arguments": arguments}


def _claude(work: Path) -> list[Rule]:
    reads = [{"name": "Read", "arguments": {"file_path": str(work / f"f{n}.txt")}} for n in range(_FILES)]
    return chain([reads[0], _bash(1), reads[2], _bash(3), reads[4], _bash(5)], _GO)


def _claude_search(_: Path) -> list[Rule]:
    search = {"call": {"name": "ToolSearch", "arguments": {"query": "select:CronList"}}}
    rules = chain([_bash(n) for n in range(4)], "no such text")
    return [
        *rules[:-1],
        {**tool_step(0, _bash(0)), "result": "(?i)no scheduled"},
        {"result": "From here on this tool", "steps": [{"text": "Found.\n"}, {"call": {"name": "CronList"}}]},
        {"when": _GO, "steps": [{"think": "A tool is missing."}, {"text": "I will search.\n"}, search]},
    ]


def _claude_agent(_: Path) -> list[Rule]:
    send = {"description": "look", "prompt": "look for the needle", "subagent_type": "general-purpose"}
    inner = chain([_bash(n) for n in range(3)], "look for the needle", then=final_step("FOUND-IT", result="of file 2:"))
    outer = chain([_bash(n) for n in range(3, 6)], "FOUND-IT", first=3)
    return [
        *outer,
        *inner,
        {"result": ".", "steps": [{"text": "Waiting."}]},
        {"when": _GO, "steps": [{"text": "I will send an agent.\n"}, {"call": {"name": "Agent", "arguments": send}}]},
    ]


def _claude_resumed(_: Path) -> list[Rule]:
    first = chain([_bash(n) for n in range(3)], _GO)
    return [*chain([_bash(n) for n in range(3, 6)], _MORE, first=3), *first]


# --- the others -------------------------------------------------------------------------------------------------------

_EXEC = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def _codex(_: Path) -> list[Rule]:
    return chain([{"name": "exec_command", "arguments": {"cmd": f"cat f{n}.txt"}} for n in range(_FILES)], _GO)


def _opencode(work: Path) -> list[Rule]:
    reads = [{"name": "read", "arguments": {"filePath": str(work / f"f{n}.txt")}} for n in range(_FILES)]
    return [_TITLE, *chain(reads, _GO)]


_PROMPT = ("-p", _GO, *_CLAUDE)
SESSIONS = (
    AgentSession("Claude Code", "claude", _claude, (_PROMPT,)),
    AgentSession("Claude Code, billing header", "claude", _claude, (_PROMPT,), {"CLAUDE_CODE_ATTRIBUTION_HEADER": "1"}),
    AgentSession("Claude Code, tool search", "claude", _claude_search, (_PROMPT,)),
    AgentSession("Claude Code, sub-agent", "claude", _claude_agent, (_PROMPT,)),
    AgentSession(
        "Claude Code, resumed", "claude", _claude_resumed, (_PROMPT, ("-p", _MORE, *_CLAUDE, "--resume", "{session}"))
    ),
    AgentSession("Codex", "codex", _codex, ((*_EXEC, _GO),)),
    AgentSession("opencode", "opencode", _opencode, (("run", "--auto", _GO),)),
)
