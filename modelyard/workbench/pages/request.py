"""One request: where its time went, why its cache missed, and its texts side by side."""

from __future__ import annotations

from collections.abc import Iterator

from nicegui import ui

from modelyard.core.errors import ModelyardError
from modelyard.workbench import words
from modelyard.workbench.client import Json
from modelyard.workbench.look import SERIES
from modelyard.workbench.parsed import parsed
from modelyard.workbench.parts import Figure, Pane, State, caps, card, heading
from modelyard.workbench.rows import first_token, timeline
from modelyard.workbench.session import Session

_EVERY_S = 1.0
_CAUSES = {
    "new_session": "It is the first of its session.",
    "not_kept": "The engine keeps nothing between requests.",
    "other_session": "The session was about something else before.",
    "evicted": "It goes on as before, but the cache no longer had it.",
    "not_copied": "Another place of the cache had more of it, and reading it again was cheaper than copying.",
    "billing_block": "A billing line of the client has changed.",
    "system_changed": "The client has changed its system prompt.",
    "tools_changed": "The client offers other tools than before.",
    "reasoning_dropped": "Reasoning of an earlier turn is no longer told.",
    "arguments_reserialised": "The arguments of a call came back in other words.",
    "message_changed": "The client has changed an earlier message.",
    "template": "The template tells the same messages in other words.",
}
_COLOURS = dict(zip(("queue", "prefill", "decode", "tokenize", "other"), SERIES, strict=False))


def page(session: Session, id: str) -> None:
    with ui.element("div").classes("line between w-full"):
        heading(f"Request {id}")
        ui.button("All requests", icon="arrow_back", on_click=lambda: ui.navigate.to("/requests")).props("flat no-caps")
    box = ui.column().classes("w-full gap-4 items-stretch")
    shown: list[Json] = []

    async def look() -> None:
        if shown and shown[-1]["ended"]:
            return
        told = await _ask(session, id, box)
        if told is not None and told != (shown[-1] if shown else None):
            shown.append(told)
            box.clear()
            with box:
                await _show(session, told)

    session.watch(_EVERY_S, look)


async def _ask(session: Session, id: str, box: ui.column) -> Json | None:
    try:
        return await session.client.request(id)
    except ModelyardError as error:
        if error.kind != "not_found":
            raise
        box.clear()
        with box:
            ui.label(error.message).classes("trouble")
        return None


async def _show(session: Session, told: Json) -> None:
    for live in told["live"]:
        _live(session, live)
    for choice, ended in enumerate(told["ended"]):
        if len(told["ended"]) > 1:
            caps(f"choice {choice + 1}")
        _ended(ended)
        await _missed(session, ended, told["texts"])
    _texts(session, told)


def _live(session: Session, live: Json) -> None:
    async def cancel() -> None:
        await session.act(session.client.cancel(live["id"]), "Cancelled")

    with card():
        with ui.element("div").classes("line between"):
            State().show(live["state"])
            ui.button("Cancel", icon="close", on_click=cancel).props("unelevated no-caps color=negative size=sm")
        with ui.element("div").classes("figures"):
            Figure("model").show(live["model"])
            Figure("cache").show(live["cache"])
            Figure("prompt").show(f"{words.count(live['tokens'])} tokens")
            Figure("waited").show(words.seconds(live["waited"]))
            Figure("position").show(str(live["position"] or words.NOTHING))


def _ended(one: Json) -> None:
    usage, timings = one["usage"], one["timings"]
    with card():
        with ui.element("div").classes("line between"):
            ui.label(f"{one['model']} · {one['cache']}").classes("name")
            ui.label(one["status"]).classes("tag" + (" text-negative" if one["failed"] else ""))
        with ui.element("div").classes("figures"):
            Figure("first token").show(words.seconds(first_token(timings)))
            Figure("tok/s").show(words.rate(one["tokens_per_s"]))
            Figure("total").show(words.seconds(timings["total"]))
            Figure("prompt").show(words.count(usage["prompt"]))
            Figure("cached").show(words.count(usage["cached"]))
            Figure("output").show(words.count(usage["output"]))
            Figure("client").show(one["key"] or words.NOTHING)
            Figure("session").show(one["session"] or words.NOTHING)
        _timeline(timeline(timings))


def _timeline(phases: list[tuple[str, float]]) -> None:
    whole = sum(seconds for _, seconds in phases) or 1.0
    caps("timeline")
    with ui.element("div").classes("stack timeline"):
        for name, seconds in phases:
            piece = ui.element("div").style(f"width: {seconds / whole * 100:.2f}%; background: {_COLOURS[name]}")
            piece.tooltip(f"{name} {words.seconds(seconds)}")
    with ui.element("div").classes("line").style("gap: 18px"):
        for name, seconds in phases:
            with ui.element("div").classes("line small"):
                ui.element("span").classes("key").style(f"background: {_COLOURS[name]}")
                ui.label(f"{name} {words.seconds(seconds)}")


# --- the cache --------------------------------------------------------------------------------------------------------


async def _missed(session: Session, one: Json, texts: Json | None) -> None:
    with card():
        caps("cache")
        for line in explained(one):
            ui.label(line)
        if one["divergence"] and texts and texts["prompt"]:
            await _where(session, one, texts["prompt"])


def explained(one: Json) -> Iterator[str]:
    usage, first = one["usage"], one["divergence"]
    prompt, cached = usage["prompt"], usage["cached"]
    if not prompt:
        yield "Nothing was read: the request ended before."
        return
    share = words.share(cached / prompt)
    yield f"{words.count(cached)} of {words.count(prompt)} prompt tokens came from the cache ({share})."
    cause = one["reuse"]["cause"] if one["reuse"] is not None else None
    if first and first < prompt:
        yield f"Up to token {words.count(first)} its place in the cache held the same; from there on it was read."
    elif first == 0 and cause != "not_copied":
        yield "Nothing in the cache began like this prompt."
    if cause in _CAUSES:
        yield _CAUSES[cause]
    if one["evicted"]:
        yield "No place was free: another conversation was thrown out of the cache for it."


async def _where(session: Session, one: Json, prompt: str) -> None:
    """The text around the first token that was not cached, if the tokens can be told apart in it."""
    try:
        head = await session.client.covered(one["model"], prompt, one["divergence"])
    except ModelyardError:
        return  # the model's vocabulary is no longer here: the sentence above has to do
    if prompt.startswith(head):
        with ui.element("div").classes("well mono text"):
            ui.label(f"… {head[-200:]}").classes("faint").style("display: inline")
            ui.label("▸").classes("text-primary").style("display: inline")
            ui.label(f"{prompt[len(head) : len(head) + 200]} …").style("display: inline")


# --- texts ------------------------------------------------------------------------------------------------------------


def _texts(session: Session, told: Json) -> None:
    texts = told["texts"]
    if texts is None:
        _no_texts(session)
        return
    endpoint = told["ended"][0]["endpoint"] if told["ended"] else ""
    with ui.element("div").classes("side"):
        _text("Rendered prompt", texts["prompt"])
        _text("Raw output", texts["output"])
        _text("Parsed events", "\n".join(parsed(endpoint, texts["response"])))
    with ui.element("div").classes("side"):
        _text("Request", texts["request"])
        _text("Reply", texts["response"])


def _text(name: str, text: str) -> None:
    with card():
        caps(name)
        Pane(text)


def _no_texts(session: Session) -> None:
    async def keep() -> None:
        await session.act(session.client.keep_texts(True), "From now on the texts of requests are kept")

    with card():
        ui.label("The texts of this request were not kept.")
        ui.button("Keep texts from now on", on_click=keep).props("outline no-caps size=sm").classes("self-start")
