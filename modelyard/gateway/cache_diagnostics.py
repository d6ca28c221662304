"""Cache diagnostics of a request: how much of its prompt the cache had, why not more, and system prompt changes."""

from __future__ import annotations

from modelyard.core.engine import Accepted
from modelyard.core.request import Audio, Image, Message
from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.prompt.media import media_kinds
from modelyard.telemetry.cache_diagnostics import (
    CacheReuse,
    PromptHistory,
    PromptRecord,
    SystemPromptTracker,
    conversation_opening,
    leading_system,
    message_at,
)
from modelyard.tokenizer.shield import unshield


class CacheDiagnostics:
    def __init__(self) -> None:
        self._system_prompts = SystemPromptTracker()
        self._sessions = PromptHistory()

    def reuse(
        self, prepared: PreparedRequest, accepted: Accepted, page: int = 1
    ) -> tuple[CacheReuse, PromptRecord] | None:
        """What the cache had of this prompt, and the record in which the reply is noted later.

        None if the prompt was not rendered here. `page` is as in `EngineInfo`.
        """
        if not prepared.prompts:
            return None
        prompt, request, model = prepared.prompts[0], prepared.request, prepared.model
        tools = tuple(tool for tool in request.tools if not tool.deferred) if request.tools else ()
        messages = request.messages
        if len(model.modalities) > 1 and media_kinds(request):
            messages = tuple(map(_with_image_hashes, messages))
        record = PromptRecord(
            prepared.caller.trace,
            unshield(prompt.text),
            len(prompt.ids),
            messages,
            tools,
            conversation_opening(messages),
        )
        # Sessions are scoped by API key; prompts without a session are compared among themselves.
        key = (prepared.target.cache, prepared.caller.key, request.session or "")
        found = self._sessions.diagnose(
            key, record, accepted.cached_tokens, prepared.text_length, page, accepted.elsewhere
        )
        return found, record

    def system_prompt_change(self, prepared: PreparedRequest, accepted: Accepted) -> str | None:
        """A message about a changed system prompt. None if it did not change, or if another sequence had it."""
        messages = prepared.request.messages
        system = leading_system(messages)
        if system is None:
            return None
        change = self._system_prompts.update(prepared.target.cache, system)
        token = accepted.divergence
        if change is None or token is None or not prepared.prompts:
            return None
        prompt, position = prepared.prompts[0], prepared.text_length(token)
        at = message_at(unshield(prompt.text), position, messages)
        if at > 0:
            return None
        return (
            f"the system prompt in cache {prepared.target.cache!r} changed from {change.before} to {change.after}: "
            f"token {token} of {len(prompt.ids)} at character {position} of the rendered prompt, in message {at} "
            f"({messages[at].role}), is the first that was not cached"
        )


def _with_image_hashes(message: Message) -> Message:
    """Images are large, and only whether they changed matters."""
    parts = tuple(Image(str(hash(part.url))) if isinstance(part, Image | Audio) else part for part in message.parts)
    return Message(message.role, parts, message.name)
