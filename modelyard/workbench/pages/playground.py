"""Talking to a model over any protocol: the answer as it comes, and beside it what went over the wire."""

from __future__ import annotations

import base64

from nicegui import events, ui

from modelyard.core.errors import ModelyardError
from modelyard.workbench.pages.answer import Answer, show_turn
from modelyard.workbench.pages.knobs import Settings
from modelyard.workbench.pages.wiretap import Wiretap
from modelyard.workbench.parts import heading
from modelyard.workbench.session import Session
from modelyard.workbench.talk import wire

_PICTURES = "image/png,image/jpeg,image/webp,image/gif"
_MOST_BYTES = 20 * 1024**2
_FLUSH_S = 0.1  # ten times a second is a stream to the eye


def page(session: Session, model: str = "") -> None:
    if model:
        session.talk.knobs.model = model
    heading("Playground", "Talk to any model in any of the three protocols, and see what goes over the wire.")
    with ui.element("div").classes("bench"):
        Playground(session)


class Playground:
    def __init__(self, session: Session) -> None:
        self._session, self._talk = session, session.talk
        self._work: ui.timer | None = None
        with ui.element("section").classes("card settings"):
            self._settings = Settings(session)
        with ui.element("section").classes("card"):
            self._turns = ui.element("div").classes("talk").props('role=log aria-label="Conversation"')
            self._composer()
        with ui.element("section").classes("card raw"):
            self._wiretap = Wiretap()
        for message in self._talk.messages:
            with self._turns:
                show_turn(message)

    # --- what is typed ------------------------------------------------------------------------------------------------

    def _composer(self) -> None:
        self._shelf = ui.element("div").classes("line")
        self._field = ui.textarea(placeholder="Say something. Enter sends, Shift+Enter begins a new line.")
        self._field.props('outlined autogrow autofocus aria-label="Message"').classes("w-full")
        self._field.on("keydown.enter.exact.prevent", self._send)
        with ui.element("div").classes("line"):
            self._go = ui.button("Send", icon="send", on_click=self._send).props("unelevated no-caps")
            self._stop = ui.button("Stop", icon="stop", on_click=self._halt).props("unelevated no-caps color=negative")
            ui.button("Clear", icon="delete_sweep", on_click=self._clear).props("flat no-caps color=grey")
            ui.space()
            self._upload()
        self._busy(False)

    def _upload(self) -> None:
        upload = ui.upload(on_upload=self._take, auto_upload=True, multiple=True, max_file_size=_MOST_BYTES)
        upload.props(f'accept="{_PICTURES}" flat label="Pictures: drop here"').classes("pictures")

    async def _take(self, event: events.UploadEventArguments) -> None:
        kind = event.file.content_type
        if kind not in _PICTURES.split(","):
            ui.notify(f"{kind} is not a picture that models read", type="negative")
            return
        data = await event.file.read()
        self._talk.pictures.append(f"data:{kind};base64,{base64.b64encode(data).decode()}")
        self._show_shelf()

    def _show_shelf(self) -> None:
        self._shelf.clear()
        with self._shelf:
            for url in self._talk.pictures:
                ui.image(url).style("width: 56px; height: 56px; border-radius: 8px").props('fit=cover alt="Picture"')

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        text = (self._field.value or "").strip()
        if self._work is not None or not (text or self._talk.pictures):
            return
        self._talk.say(text)
        self._field.set_value("")
        self._show_shelf()
        self._ask()

    def _ask(self) -> None:
        """The last message is on the list; it goes back into the field if nothing comes of it."""
        try:
            wire_ = wire(self._talk.knobs.wire)
            body = wire_.write_request(self._settings.request())
        except ModelyardError as error:
            self._take_back(error.message)
            return
        with self._turns:
            question = show_turn(self._talk.messages[-1])
            answer = Answer(self._talk, wire_, question, self._resume)
        self._wiretap.begin(self._session.client, wire_, body)
        self._busy(True)
        with self._turns:  # deleted with the page, and with it the work
            self._work = ui.timer(0, lambda: self._run(answer, body), once=True)
            flushing = ui.timer(_FLUSH_S, lambda: self._flush(answer))
        answer.on_end = flushing.cancel

    async def _run(self, answer: Answer, body: bytes) -> None:
        try:
            async for data in self._session.client.stream(answer.wire, body):
                self._wiretap.saw(data)
                answer.feed(data)
            answer.finish()
        except ModelyardError as error:
            answer.fail(error)
        finally:
            answer.close()
            self._work = None
            if not self._turns.is_deleted:
                self._flush(answer)
                self._busy(False)

    def _flush(self, answer: Answer) -> None:
        self._wiretap.flush()
        if answer.flush():
            ui.run_javascript(f"const e = getHtmlElement({self._turns.id}); if (e) e.scrollTop = e.scrollHeight")

    def _resume(self, results: dict[str, str]) -> None:
        if self._work is None:
            self._talk.hand_over(results)
            self._ask()

    def _halt(self) -> None:
        if self._work is not None:
            self._work.cancel(with_current_invocation=True)

    def _take_back(self, why: str) -> None:
        lost = self._talk.messages.pop()
        self._field.set_value("".join(getattr(part, "text", "") for part in lost.parts))
        ui.notify(why, type="negative", multi_line=True, close_button="Close")

    def _busy(self, busy: bool) -> None:
        self._go.set_visibility(not busy)
        self._stop.set_visibility(busy)

    def _clear(self) -> None:
        self._halt()
        self._talk.clear()
        self._turns.clear()
        self._show_shelf()
