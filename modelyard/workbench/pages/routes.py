"""Type a model's name as a client would send it, and see where it leads."""

from __future__ import annotations

from nicegui import ui

from modelyard.core.errors import ModelyardError
from modelyard.workbench import words
from modelyard.workbench.parts import Figure, card, heading
from modelyard.workbench.session import Session

_ENDPOINTS = {
    "/v1/chat/completions": "OpenAI Chat Completions",
    "/v1/responses": "OpenAI Responses",
    "/v1/messages": "Anthropic Messages",
}


def page(session: Session) -> None:
    heading("Routes", "Type a model's name as a client would send it, and see where it leads.")
    with card():
        with ui.element("div").classes("fields w-full"):
            name = ui.input("Model name", placeholder="claude-haiku-4-5").props("outlined autofocus debounce=250")
            endpoint = ui.select(_ENDPOINTS, value="/v1/chat/completions", label="Protocol").props("outlined")
        trouble = ui.label("").classes("trouble text")
        trouble.set_visibility(False)
        with ui.element("div").classes("figures") as found:
            model, cache, window, backend, overflow, remote = (
                Figure(what) for what in ("model", "cache", "window", "engine", "too long", "leaves this machine")
            )
        found.set_visibility(False)

    async def look() -> None:
        asked = (name.value or "").strip()
        found.set_visibility(False)
        trouble.set_visibility(False)
        if not asked:
            return
        try:
            told = await session.client.route(asked, endpoint.value or "")
        except ModelyardError as error:
            trouble.set_text(error.message)
            trouble.set_visibility(True)
            await session.act(_again(error))
            return
        model.show(told["model"])
        cache.show(told["cache"])
        window.show(f"{words.count(told['window'])} tokens")
        backend.show(told["backend"])
        overflow.show("refused" if told["strict"] else "answer shortened")
        remote.show("with consent" if told["allow_remote"] else "no")
        found.set_visibility(True)

    name.on_value_change(look)
    endpoint.on_value_change(look)


async def _again(error: ModelyardError) -> None:
    """A key that is missing is asked for; anything else stands on the page already."""
    if error.kind in ("unauthenticated", "forbidden"):
        raise error
