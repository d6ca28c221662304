"""Watches what each cache was asked: how much of a prompt it had, why not more, and which system prompt it was."""

from __future__ import annotations

from modelyard.core.engine import Accepted
from modelyard.core.request import Image, Message, Request
from modelyard.gateway.capabilities import has_images
from modelyard.gateway.prepared_request import PreparedRequest, RenderedPrompt
from modelyard.telemetry.cache_diagnostics import (
    CacheReuse,
    PromptHistory,
    PromptRecord,
    SessionKey,
    SystemPromptChange,
    SystemPromptTracker,
    conversation_opening,
    leading_system,
    message_at,
)
from modelyard.tokenizer.shield import unshield


class CacheDiagnostics:
    def __init__(self) -> None:
        self._seen = SystemPromptTracker()
        self._sessions = PromptHistory()

    def reuse(self, job: PreparedRequest, where: Accepted, page: int = 1) -> tuple[CacheReuse, PromptRecord] | None:
        """What the cache did for this prompt, which is now remembered: its answer is to be noted there. None where it
        was not rendered here. `page` is as in `EngineInfo`."""
        if not job.runs:
            return None
        run, request = job.runs[0], job.request
        tools = tuple(tool for tool in request.tools if not tool.deferred) if request.tools else ()
        messages = _light(request) if "image" in job.model.modalities else request.messages
        asked = PromptRecord(
            job.caller.trace, unshield(run.text), len(run.ids), messages, tools, conversation_opening(messages)
        )
        found = self._sessions.look(_key(job), asked, where.cached_tokens, job.characters, page, where.elsewhere)
        return found, asked

    def look(self, job: PreparedRequest, where: Accepted) -> str | None:
        """None where the prompt stayed, or where another sequence of the cache had the changed one already."""
        system = leading_system(job.request.messages)
        if system is None:
            return None
        change = self._seen.look(job.target.cache, system)
        if change is None or where.divergence is None or (run := job.run(0)) is None:
            return None
        return _told(change, job, run, where.divergence)


def _key(job: PreparedRequest) -> SessionKey:
    """Sessions are each API key's own; prompts without one are compared among themselves."""
    return job.target.cache, job.caller.key, job.request.session or ""


def _light(request: Request) -> tuple[Message, ...]:
    """Without the pictures themselves: they are large, and only whether they changed matters."""
    return tuple(map(_unpictured, request.messages)) if has_images(request) else request.messages


def _unpictured(message: Message) -> Message:
    parts = tuple(Image(str(hash(part.url))) if isinstance(part, Image) else part for part in message.parts)
    return Message(message.role, parts, message.name)


def _told(change: SystemPromptChange, job: PreparedRequest, run: RenderedPrompt, token: int) -> str | None:
    messages = job.request.messages
    position = job.characters(token)
    at = message_at(unshield(run.text), position, messages)
    if at > 0:
        return None
    return (
        f"the system prompt in cache {job.target.cache!r} changed from {change.before} to {change.after}: "
        f"token {token} of {len(run.ids)}, in message {at} ({messages[at].role}), is the first that was not cached; "
        f"it stands at character {position} of the rendered prompt"
    )
