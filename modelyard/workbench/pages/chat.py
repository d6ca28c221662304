"""The chat page: stored chats, one or several models that answer, and the request and events on the wire."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from nicegui import background_tasks, events, ui

from modelyard.core.chat import Chat, ChatSummary, Turn, new_id, to_markdown
from modelyard.core.errors import ModelyardError
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    ReplyBuilder,
    Started,
    Usage,
)
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Audio, Document, Image, Part, Text, Thinking, ToolCall, ToolResult
from modelyard.http.errors import load_protocol
from modelyard.workbench import formatting as fmt
from modelyard.workbench.api_client import Json
from modelyard.workbench.chat_request import (
    FILE_TYPES,
    ProgressReader,
    answer_reader,
    attached_part,
    chat_request,
    progress_text,
    refusal,
    wire_protocol,
)
from modelyard.workbench.components import MarkdownText, StreamingText, copy_button, page_heading, show_notice
from modelyard.workbench.pages.chat_side import SettingsForm, WireInspector
from modelyard.workbench.pages.models import GetModelsPanel
from modelyard.workbench.session import PageSession

MAX_MODELS = 4  # that answer side by side
_MAX_FILE_BYTES = 20 * 1024**2
_FLUSH_INTERVAL_S = 0.1
_COUNT_DELAY_S = 0.4  # after the last key


def page(session: PageSession, model: str = "", id: str = "") -> None:
    page_heading("Chat")
    ChatPage(session, model, id)


class ChatPage:
    """The conversation, with the list of chats and the settings beside it: panels that are folded away where the page
    is narrow. Which ones are open is the browser's business."""

    def __init__(self, session: PageSession, model: str, id: str) -> None:
        self._session = session
        with ui.element("div").classes("chat-page") as box:
            with ui.element("section").classes("chat-list").props('aria-label="Chats"'):
                self._list = ChatList(session, self._open, self._new)
            with ui.element("section").classes("chat-main").props('aria-label="Conversation"'):
                with ui.element("div").classes("chat-bar"):
                    _toggle("menu_open", "Chats", box, "list")
                    self._models = ModelPicker(session, self._models_changed)
                    _toggle("tune", "Settings", box, "side")
                self._empty = ui.element("div").classes("no-model")
                self._view = ChatView(session, self._list.refresh)
            with ui.element("section").classes("chat-side").props('aria-label="Settings and wire"'):
                with ui.tabs().props("dense no-caps align=left").classes("w-full") as tabs:
                    settings_tab = ui.tab("Settings")
                    for name in WireInspector.PANES:
                        ui.tab(name)
                with ui.tab_panels(tabs, value=settings_tab, keep_alive=True).classes("w-full").props("animated=false"):
                    with ui.tab_panel(settings_tab).classes("px-0") as self._form_box:
                        pass
                    self._view.inspector = WireInspector()
        if model:
            session.chat.settings.models = [model]
        self._show()
        ui.timer(0, lambda: session.perform(self._list_models()), once=True)
        if id and id != session.chat.id:
            ui.timer(0, lambda: self._open(id), once=True)

    async def _list_models(self) -> None:
        if not await self._models.load() and self._session.may("operator"):
            with self._empty:
                GetModelsPanel(self._session, self._got)

    def _got(self, model: str) -> None:
        self._session.chat.settings.models = [model]
        self._empty.clear()
        background_tasks.create(self._models.load(), name="models")

    async def _models_changed(self) -> None:
        self._view.count_soon()
        self._view.show_inputs(self._models.modalities())
        await self._form.show_defaults()

    def _show(self) -> None:
        self._form_box.clear()
        with self._form_box:
            self._form = SettingsForm(self._session, self._view.count_soon)
        self._models.show()
        self._view.show()

    async def _open(self, chosen: str | Chat) -> None:
        try:
            chat = chosen if isinstance(chosen, Chat) else await self._session.client.chat(chosen)
        except ModelyardError as error:
            self._session.show_error(error)
            return
        self._view.stop()
        self._session.chat = chat
        self._show()
        _show_path(f"/chat/{chat.id}")
        self._list.refresh()

    def _new(self) -> None:
        self._view.stop()
        self._session.chat = Chat(settings=replace(self._session.chat.settings))
        self._show()
        _show_path("/chat")
        self._list.refresh()


def _toggle(icon: str, label: str, page: ui.element, panel: str) -> None:
    """A button that opens or closes a panel, in the browser alone."""
    button = ui.button(icon=icon).props(f'flat round dense color=muted aria-label="{label}"').classes("toggle")
    button.on("click", js_handler=f"() => modelyard.toggle(getHtmlElement({page.id}), '{panel}')")
    button.tooltip(label)


def _show_path(path: str) -> None:
    """Change the address in the browser without opening another page."""
    ui.run_javascript(f"history.replaceState(null, '', '/workbench{path}')")


class ModelPicker:
    """Which models answer, on top of the conversation."""

    def __init__(self, session: PageSession, on_change: Callable[[], Any]) -> None:
        self._session, self._on_change = session, on_change
        self._records: dict[str, Json] = {}
        self._select = ui.select([], multiple=True, with_input=True, new_value_mode="add-unique").classes("model grow")
        self._select.props(f"outlined dense use-chips max-values={MAX_MODELS} aria-label=Models")
        self._select.tooltip(f"Up to {MAX_MODELS} models answer side by side")
        self._select.on_value_change(self._changed)

    async def load(self) -> bool:
        """Whether a model can chat. Without a choice, the first that can is chosen; loaded ones come first."""
        self._records = {str(record["id"]): record for record in await self._session.client.models()}
        can_chat = [name for name, record in self._records.items() if "chat" in record.get("capabilities", ("chat",))]
        settings = self._session.chat.settings
        settings.models = settings.models or can_chat[:1]
        self.show()
        await self._on_change()
        return bool(can_chat)

    def show(self) -> None:
        chosen = self._session.chat.settings.models
        self._select.set_options(list(dict.fromkeys([*self._records, *chosen])), value=list(chosen))

    def modalities(self) -> dict[str, list[str]]:
        """What each chosen model takes."""
        chosen = self._session.chat.settings.models
        return {name: self._records[name].get("modalities", ["text"]) for name in chosen if name in self._records}

    async def _changed(self, event: Any) -> None:
        if (event.value or []) != self._session.chat.settings.models:
            self._session.chat.settings.models = event.value or []
            await self._on_change()


# --- the list of chats ------------------------------------------------------------------------------------------------


class ChatList:
    """The stored chats, newest first, with a search over their texts."""

    def __init__(
        self, session: PageSession, open_chat: Callable[[str | Chat], Any], new_chat: Callable[[], None]
    ) -> None:
        self._session, self._open, self._new = session, open_chat, new_chat
        with ui.element("div").classes("line no-wrap w-full"):
            self._search = ui.input(placeholder="Search").props('outlined dense clearable debounce=300 type="search"')
            self._search.props('aria-label="Search in chats"').classes("grow").on_value_change(self.refresh)
            button = ui.button(icon="add", on_click=new_chat).props('unelevated dense aria-label="New chat"')
            button.tooltip("New chat")
            upload = ui.upload(on_upload=self._import, auto_upload=True, max_file_size=_MAX_FILE_BYTES)
            upload.props('accept=".json"').classes("hidden chat-file")
            choose = ui.button(icon="file_open", on_click=lambda: upload.run_method("pickFiles"))
            choose.props('flat dense color=muted aria-label="Open a chat file"').tooltip("Open a chat file")
        self._box = ui.element("div").classes("rows").props("role=list")
        self._empty = ui.label("").classes("muted small")
        self._rows: dict[str, ChatRow] = {}
        self.refresh()

    def refresh(self) -> None:
        background_tasks.create_or_defer(self._load(), name=f"chats {id(self)}")

    async def _load(self) -> None:
        """Rows stay the same elements: a menu may be open on one, or a finger on it."""
        if not self._session.keeps_chats:
            show_notice(self._empty, "Chats of other users of this machine are not stored here.")
            return
        try:
            found = await self._session.client.chats(self._search.value or "")
        except ModelyardError as error:
            self._session.show_error(error)
            return
        if self._box.is_deleted:
            return
        show_notice(self._empty, "" if found else "Nothing found." if self._search.value else "No chats yet.")
        for gone in self._rows.keys() - {summary.id for summary in found}:
            self._rows.pop(gone).delete()
        for place, summary in enumerate(found):
            if summary.id not in self._rows:
                with self._box:
                    self._rows[summary.id] = ChatRow(self, summary)
            self._rows[summary.id].update(summary, place, is_current=summary.id == self._session.chat.id)

    def open(self, id: str) -> Any:
        return self._open(id)

    async def _import(self, event: events.UploadEventArguments) -> None:
        """A file that someone has exported becomes a chat of one's own."""
        try:
            chat = msgspec.json.decode(await event.file.read(), type=Chat)
        except msgspec.MsgspecError:
            ui.notify(f"{event.file.name} is no chat: export one as a file to share it", type="negative")
            return
        chat.id, chat.revision = new_id(), 0
        try:
            if self._session.keeps_chats:
                await self._session.store(chat)
        except ModelyardError as error:
            self._session.show_error(error)
            return
        await self._open(chat)

    def rename(self, chat: ChatSummary) -> None:
        with ui.dialog() as dialog, ui.card().classes("card w-96"):
            name = ui.input("Name of the chat", value=chat.title).props("outlined autofocus").classes("w-full")

            async def submit() -> None:
                dialog.close()
                await self._change(chat.id, lambda found: setattr(found, "title", (name.value or "").strip()))

            name.on("keydown.enter", submit)
            ui.button("Rename", on_click=submit).props("unelevated no-caps").classes("self-end")
        dialog.open()

    async def _change(self, id: str, change: Callable[[Chat], None]) -> None:
        try:
            chat = self._session.chat if id == self._session.chat.id else await self._session.client.chat(id)
            change(chat)
            await self._session.store(chat)
        except ModelyardError as error:
            self._session.show_error(error)
        self.refresh()

    async def export(self, id: str, kind: str) -> None:
        try:
            chat = await self._session.client.chat(id)
        except ModelyardError as error:
            self._session.show_error(error)
            return
        name = "".join(letter if letter.isalnum() else "-" for letter in chat.display_title)[:60].strip("-") or "chat"
        content = to_markdown(chat).encode() if kind == "md" else msgspec.json.format(msgspec.json.encode(chat))
        ui.download.content(content, f"{name}.{kind}")

    async def duplicate(self, id: str) -> None:
        try:
            copied = (await self._session.client.chat(id)).copy(time.time())
            await self._session.store(copied)
        except ModelyardError as error:
            self._session.show_error(error)
            return
        await self._open(copied.id)

    def delete(self, chat: ChatSummary) -> None:
        with ui.dialog() as dialog, ui.card().classes("card w-96"):
            ui.label(f"Delete “{chat.title}”?").classes("name")
            ui.label("It cannot be restored.").classes("muted small")

            async def confirm() -> None:
                dialog.close()
                if await self._session.perform(self._session.client.delete_chat(chat.id)):
                    if chat.id == self._session.chat.id:
                        self._new()
                    self.refresh()

            with ui.element("div").classes("line self-end"):
                ui.button("Cancel", on_click=dialog.close).props("flat no-caps")
                ui.button("Delete", on_click=confirm).props("unelevated no-caps color=negative")
        dialog.open()


class ChatRow:
    def __init__(self, chats: ChatList, chat: ChatSummary) -> None:
        self._chat, self._is_current = chat, False
        with ui.element("div").classes("row").props("role=listitem") as self._box:
            open_button = ui.button(on_click=lambda: chats.open(self._chat.id)).props("flat no-caps align=left")
            with open_button.classes("grow title-button"), ui.column().classes("gap-0 items-start"):
                self._title = ui.label(chat.title).classes("row-title")
                self._updated = ui.label("").classes("muted small")
            more = ui.button(icon="more_vert").props('flat round dense size=sm color=muted aria-label="More"')
            with more, ui.menu():
                ui.menu_item("Rename", lambda: chats.rename(self._chat))
                ui.menu_item("Export as Markdown", lambda: chats.export(self._chat.id, "md"))
                ui.menu_item("Export as a file to share", lambda: chats.export(self._chat.id, "json"))
                ui.menu_item("Duplicate what is shown", lambda: chats.duplicate(self._chat.id))
                ui.menu_item("Delete", lambda: chats.delete(self._chat))

    def update(self, chat: ChatSummary, place: int, *, is_current: bool) -> None:
        self._chat = chat
        self._title.set_text(chat.title)
        self._updated.set_text(fmt.ago(chat.updated, time.time()))
        if is_current != self._is_current:
            self._is_current = is_current
            self._box.classes(add="current" if is_current else "", remove="" if is_current else "current")
        siblings = self._box.parent_slot.children if self._box.parent_slot is not None else []
        if siblings and siblings[place] is not self._box:
            self._box.move(target_index=place)

    def delete(self) -> None:
        self._box.delete()


# --- one chat ---------------------------------------------------------------------------------------------------------


class ChatView:
    """The turns of the session's chat, and the composer. Several answers may be streamed at a time."""

    def __init__(self, session: PageSession, on_stored: Callable[[], None]) -> None:
        self._session, self._on_stored = session, on_stored
        self.inspector: WireInspector  # set by the page
        self._streams: dict[str, ui.timer] = {}  # by the id of the answer; its task streams it
        self._attached: list[Part] = []
        self._modalities: dict[str, list[str]] = {}  # what each chosen model takes
        with ui.element("div").classes("messages-box"):
            self._messages = ui.element("div").classes("messages")
            self._messages.props('role=log aria-label="Messages" tabindex=0')
            jump = ui.button(icon="arrow_downward", on_click=self._jump).classes("jump")
            jump.props('round unelevated dense aria-label="Jump to the end"')
        self._build_composer()

    # --- composing ----------------------------------------------------------------------------------------------------

    def _build_composer(self) -> None:
        with ui.element("div").classes("chat-foot"):
            self._build_foot()
        self._update_busy()

    def show_inputs(self, modalities: dict[str, list[str]]) -> None:
        """What the chosen models take."""
        self._modalities = modalities
        self._speak.set_visibility(bool(modalities) and all("audio" in taken for taken in modalities.values()))

    def _build_foot(self) -> None:
        self._attachments = ui.element("div").classes("line")
        self._refusal = ui.label("").classes("error small text").props("role=alert")
        self._refusal.set_visibility(False)
        with ui.element("div").classes("w-full composer") as composer:
            self._input = ui.textarea(placeholder="Type a message. Enter sends, Shift+Enter starts a new line.")
            self._input.props('outlined autogrow autofocus aria-label="Message"').classes("w-full")
            self._input.on("keydown.enter.exact.prevent", self._send)
            self._input.on_value_change(self.count_soon)
        with ui.element("div").classes("line no-wrap w-full"):
            upload = ui.upload(on_upload=self._attach, auto_upload=True, multiple=True, max_file_size=_MAX_FILE_BYTES)
            upload.props(f'accept="{",".join(FILE_TYPES)}"').classes("hidden").on("rejected", self._rejected)
            attach = ui.button(icon="attach_file", on_click=lambda: upload.run_method("pickFiles"))
            attach.props('flat dense color=muted aria-label="Attach files"')
            attach.tooltip("Images, sound and PDF; or paste or drop them")
            self._speak = ui.button(icon="mic").props('flat dense color=muted aria-label="Speak"').classes("speak")
            record = f"() => modelyard.record(getHtmlElement({self._speak.id}), {upload.id})"
            self._speak.on("click", js_handler=record)
            self._speak.tooltip("Record a message; click again to end it")
            self._speak.set_visibility(False)
            ui.space()
            with ui.element("div").classes("context-meter") as self._count_box:
                self._count = ui.label("").classes("muted small").props("aria-live=polite")
                self._fill = ui.linear_progress(0, show_value=False, size="3px").props('aria-label="Context in use"')
            self._send_button = ui.button("Send", icon="send", on_click=self._send).props("unelevated no-caps")
            self._stop_button = ui.button("Stop", icon="stop", on_click=self.stop)
            self._stop_button.props("unelevated no-caps color=negative")
        self._fill.set_visibility(False)
        with self._count_box:
            self._count_timer = ui.timer(_COUNT_DELAY_S, self._count_tokens, once=True)
        ui.run_javascript(
            f"modelyard.follow(getHtmlElement({self._messages.id}));"
            f"modelyard.takeFiles(getHtmlElement({composer.id}), {upload.id})"
        )

    async def _attach(self, event: events.UploadEventArguments) -> None:
        """A file that a chosen model does not take is refused, with the reason."""
        name = event.file.name
        try:
            part = attached_part(name, event.file.content_type, await event.file.read())
        except ModelyardError as error:
            show_notice(self._refusal, error.message)
            return
        reason = refusal(part, name, self._modalities)
        show_notice(self._refusal, reason)
        if not reason:
            self._attached.append(part)
            self._show_attachments()

    def _rejected(self) -> None:
        show_notice(
            self._refusal, f"Images, WAV, MP3, FLAC and PDF of up to {fmt.size(_MAX_FILE_BYTES)} can be attached."
        )

    def _show_attachments(self) -> None:
        self._attachments.clear()
        with self._attachments:
            for part in self._attached:
                with ui.element("div").classes("attachment"):
                    _show_part(part)
                    remove = ui.button(icon="close", on_click=lambda part=part: self._detach(part))
                    remove.props('round dense size=xs color=grey-8 aria-label="Remove"')
        self.count_soon()

    def _detach(self, part: Part) -> None:
        self._attached.remove(part)
        self._show_attachments()

    def _update_busy(self) -> None:
        self._send_button.set_visibility(not self._streams)
        self._stop_button.set_visibility(bool(self._streams))

    def _jump(self) -> None:
        ui.run_javascript(f"modelyard.jump(getHtmlElement({self._messages.id}))")

    # --- how full the window is ---------------------------------------------------------------------------------------

    def count_soon(self) -> None:
        self._count_timer.cancel()
        with self._count_box:
            self._count_timer = ui.timer(_COUNT_DELAY_S, self._count_tokens, once=True)

    async def _count_tokens(self) -> None:
        """Of the chat with the message that is being typed. Models that cannot count show nothing."""
        chat = self._session.chat
        if not chat.settings.models or self._session.locked:
            return
        draft = (*self._attached, *((Text(self._input.value),) if self._input.value else ()))
        try:
            request = chat_request(chat, chat.settings.models[0], draft=draft)
            count, window = await self._session.client.count_tokens(request)
        except ModelyardError:
            self._count.set_text("")
            self._fill.set_visibility(False)
            return
        if window:
            self._count.set_text(f"{fmt.count(count)} of {fmt.count(window)} tokens")
            self._fill.set_value(min(1.0, count / window))
            self._fill.props(f"color={'negative' if count > window else 'primary'}")
        else:
            self._count.set_text(f"{fmt.count(count)} tokens")
        self._fill.set_visibility(bool(window))

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        text = (self._input.value or "").strip()
        if self._streams or not (text or self._attached):
            return
        parts = (*self._attached, *((Text(text),) if text else ()))
        chat = self._session.chat
        turn = Turn(parent=chat.head, role="user", parts=parts, at=time.time())
        if self._ask(turn):
            self._input.set_value("")
            self._attached = []
            show_notice(self._refusal, "")
            self._show_attachments()

    def _ask(self, turn: Turn) -> bool:
        """Add a turn and request an answer from each chosen model."""
        chat = self._session.chat
        before = chat.head
        chat.add(turn)
        if not self._answer(turn.id, chat.settings.models):
            chat.remove(turn)
            chat.head = before
            return False
        return True

    def _answer(self, parent: str, models: Sequence[str]) -> bool:
        """Whether a request could be made. The answers are added as alternatives."""
        chat = self._session.chat
        try:
            protocol = load_protocol(wire_protocol(chat.settings))
            bodies = [protocol.write_request(chat_request(chat, model, parent)) for model in models]
        except ModelyardError as error:
            self._session.show_error(error)
            return False
        if not models:
            ui.notify("Choose a model first", type="negative")
            return False
        round = new_id() if len(models) > 1 else ""
        turns = [Turn(parent=parent, role="assistant", at=time.time(), model=model, round=round) for model in models]
        for turn in turns:
            chat.turns.append(turn)
        chat.head = turns[0].id
        self.show(dict(zip((turn.id for turn in turns), bodies, strict=True)))
        self._save()
        self._jump()
        return True

    def _stream_into(self, view: AnswerView, body: bytes) -> None:
        """The timers, and with them the stream, end when the page is left."""
        protocol = load_protocol(wire_protocol(self._session.chat.settings))
        self.inspector.start(view.turn.id, self._session.client, protocol, body)
        flushing = ui.timer(_FLUSH_INTERVAL_S, lambda: self._flush(view))
        self._streams[view.turn.id] = ui.timer(0, lambda: self._stream(view, protocol, body, flushing), once=True)
        self._update_busy()

    async def _stream(self, view: AnswerView, protocol: WireProtocol, body: bytes, flushing: ui.timer) -> None:
        try:
            async for data in self._session.client.stream(protocol, body):
                self.inspector.feed(view.turn.id, data)
                view.feed(data)
            view.finish()
        except ModelyardError as error:
            view.fail(error)
        finally:
            flushing.cancel()
            view.close()
            self._streams.pop(view.turn.id, None)
            self._save()
            if not self._messages.is_deleted:
                self._flush(view)
                view.show_end()
                self._update_busy()
                self.count_soon()
                if view.needs_attention:
                    self._jump()

    def _flush(self, view: AnswerView) -> None:
        self.inspector.flush()
        view.flush()

    def stop(self) -> None:
        for stream in list(self._streams.values()):
            stream.cancel(with_current_invocation=True)

    def _save(self) -> None:
        """In the background: a chat that cannot be stored is still shown, and the reason with it."""
        chat = self._session.chat
        chat.updated = time.time()
        chat.created = chat.created or chat.updated
        if not self._session.keeps_chats:
            return

        async def save() -> None:
            try:
                is_new = chat.revision == 0
                await self._session.store(chat)
            except ModelyardError as error:
                if not self._messages.is_deleted:
                    with self._messages:
                        self._session.show_error(error)
                return
            if not self._messages.is_deleted and chat is self._session.chat:
                with self._messages:
                    if is_new:
                        _show_path(f"/chat/{chat.id}")
                self._on_stored()

        self._session.saving.append(background_tasks.create(save(), name="save chat"))

    # --- showing ------------------------------------------------------------------------------------------------------

    def show(self, bodies: dict[str, bytes] | None = None) -> None:
        """Show the path of the chat. `bodies` are the requests of answers that begin now."""
        chat = self._session.chat
        results = {part.call_id: part for turn in chat.turns for part in turn.parts if isinstance(part, ToolResult)}
        self._messages.clear()
        with self._messages:
            if not chat.turns:
                ui.label(
                    "Ask anything." + (" The chat is stored on this server." if self._session.keeps_chats else "")
                ).classes("muted empty")
            for turn in chat.path():
                if turn.role == "user":
                    UserTurnView(self, turn)
                elif turn.role == "assistant":
                    answers = chat.round(turn)
                    with ui.element("div").classes("round" if len(answers) > 1 else "w-full"):
                        for answer in answers:
                            view = AnswerView(self, answer, results)
                            if bodies and answer.id in bodies:
                                self._stream_into(view, bodies[answer.id])
        self._update_busy()
        self.count_soon()

    @property
    def chat(self) -> Chat:
        return self._session.chat

    @property
    def may_see_requests(self) -> bool:
        return self._session.may("operator")

    @property
    def is_streaming(self) -> bool:
        return bool(self._streams)

    def rewrite(self, turn: Turn, text: str) -> None:
        """Send another version of a message; the old one stays as an alternative."""
        chat = self._session.chat
        if not self._streams and text.strip():
            shown = chat.head
            edited = chat.rewrite(turn, text, time.time())
            if not self._answer(edited.id, chat.settings.models):
                chat.remove(edited)
                chat.head = shown

    def regenerate(self, turn: Turn) -> None:
        """Another answer to the same message, by the model that gave this one."""
        if not self._streams and turn.parent is not None:
            self._answer(turn.parent, [turn.model] if turn.model else self._session.chat.settings.models)

    def select(self, turn: Turn) -> None:
        if not self._streams:
            self._session.chat.select(turn)
            self.show()
            self._save()

    def send_results(self, turn: Turn, results: dict[str, str]) -> None:
        if not self._streams:
            parts = tuple(ToolResult(call, (Text(text),)) for call, text in results.items())
            self._session.chat.head = turn.id
            self._ask(Turn(parent=turn.id, role="tool", parts=parts, at=time.time()))


def _small_button(icon: str, label: str, on_click: Callable[[], Any]) -> ui.button:
    button = ui.button(icon=icon, on_click=on_click).props(f'flat round dense size=sm color=muted aria-label="{label}"')
    button.tooltip(label)
    return button


def _alternatives(view: ChatView, turn: Turn) -> None:
    """Which version of a turn is shown, with buttons to the others."""
    versions = view.chat.alternatives(turn)
    if len(versions) < 2:
        return
    at = next(index for index, version in enumerate(versions) if version.id == turn.id)
    with ui.element("div").classes("line versions"):
        back = _small_button("chevron_left", "Previous version", lambda: view.select(versions[at - 1]))
        back.set_enabled(at > 0)
        ui.label(f"{at + 1} / {len(versions)}").classes("muted small")
        onward = _small_button("chevron_right", "Next version", lambda: view.select(versions[at + 1]))
        onward.set_enabled(at < len(versions) - 1)


def _show_part(part: Part) -> None:
    if isinstance(part, Image):
        ui.image(part.url).classes("picture").props('alt="Attached image"')
    elif isinstance(part, Audio):
        ui.audio(part.url).classes("sound").props('aria-label="Attached sound"')
    elif isinstance(part, Document):
        with ui.element("div").classes("file-chip line no-wrap"):
            ui.icon("picture_as_pdf").classes("text-lg").props("aria-hidden=true")
            ui.label(part.name or "document.pdf").classes("text small")
            ui.label(fmt.size(len(part.url) * 3 // 4)).classes("muted small")
    elif isinstance(part, Text):
        ui.label(part.text).classes("text")


class UserTurnView:
    def __init__(self, view: ChatView, turn: Turn) -> None:
        self._view, self._turn = view, turn
        with ui.element("div").classes("turn user") as self._box:
            self._show()

    def _show(self) -> None:
        for part in self._turn.parts:
            _show_part(part)
        with ui.element("div").classes("line actions"):
            _alternatives(self._view, self._turn)
            copy_button(lambda: self._turn.text, "Copy the message")
            _small_button("edit", "Edit and send again", self._edit)

    def _edit(self) -> None:
        if self._view.is_streaming:
            return
        self._box.clear()
        with self._box:
            field = ui.textarea(value=self._turn.text).props('outlined autogrow autofocus aria-label="Edited message"')
            field.classes("w-full edit-field")

            def send() -> None:
                self._view.rewrite(self._turn, field.value or "")

            field.on("keydown.enter.exact.prevent", send)
            field.on("keydown.escape", self._view.show)
            with ui.element("div").classes("line"):
                ui.button("Send", on_click=send).props("unelevated no-caps size=sm")
                ui.button("Cancel", on_click=self._view.show).props("flat no-caps size=sm")


class AnswerView:
    """An answer, stored or while it is streamed: reasoning folded away, text as Markdown, tool calls as cards. However
    it ends, the chat can go on."""

    def __init__(self, view: ChatView, turn: Turn, results: dict[str, ToolResult]) -> None:
        self._view, self.turn, self._results = view, turn, results
        self._builder, self._speed, self._progress = ReplyBuilder(), SpeedMeter(), ProgressReader()
        self._reader = answer_reader(view.chat.settings)
        self._boxes: list[StreamingText | MarkdownText] = []
        self._texts: list[tuple[str, str]] = []  # kind and text of each block, for an answer that is cut off
        self._thinking: ui.expansion | None = None
        self._cards: dict[str, ui.element] = {}  # of calls, by their ids
        with ui.element("div").classes("turn assistant"):
            ui.label(turn.model).classes("muted small")
            with ui.element("div").classes("waiting w-full") as self._placeholder:
                self._state = ui.label("Sent").classes("muted small").props("role=status")
                self._bar = ui.linear_progress(0, show_value=False, size="4px").props('rounded aria-label="Progress"')
            self._body = ui.element("div").classes("w-full")
            self._footer = ui.element("div").classes("line muted small actions")
        if turn.end:
            self._show_stored()

    def _show_stored(self) -> None:
        with self._body:
            for part in self.turn.parts:
                if isinstance(part, Thinking):
                    self._start_thinking("Thoughts").append(part.text)
                elif isinstance(part, ToolCall):
                    ToolCallCard(part, self._results.get(part.id))
                elif isinstance(part, Text):
                    box = MarkdownText()
                    box.append(part.text)
                    self._boxes.append(box)
        self.flush()
        self.show_end()

    # --- streaming ----------------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        for progress in self._progress.feed(data) if not self._texts else ():
            text, share = progress_text(progress)
            self._state.set_text(text)
            self._bar.set_value(share)
            self._bar.props(remove="indeterminate") if share else self._bar.props("indeterminate")
        self._handle(self._reader.feed(data))

    def finish(self) -> None:
        self._handle(self._reader.finish())

    def flush(self) -> None:
        for box in self._boxes:
            box.flush(at_end=bool(self.turn.end))

    def _handle(self, new_events: list[Event]) -> None:
        for event in new_events:
            if isinstance(event, Failed):
                raise event.error
            self._builder.feed([event])
            if isinstance(event, Started):
                self._change(request="".join(letter for letter in event.id if letter.isalnum()))
            elif isinstance(event, BlockStart):
                self._start_block(event)
            elif isinstance(event, BlockDelta):
                self._speed.delta()
                self._boxes[-1].append(event.text)
                kind, text = self._texts[-1]
                self._texts[-1] = kind, text + event.text
            elif isinstance(event, BlockEnd) and event.result is not None:
                with self._cards.get(event.result.call_id, self._body):
                    _show_result(event.result)
            elif isinstance(event, Finished):
                reply = self._builder.reply()
                parts = tuple(block.part for block in reply.blocks)
                summary = f"{self._speed.summary(event.usage)} · {event.reason}"
                self._change(parts=parts or (Text(""),), end="finished", summary=summary)

    def _start_block(self, event: BlockStart) -> None:
        self._placeholder.set_visibility(False)
        self._texts.append((event.kind, ""))
        if self._thinking is not None:
            self._thinking.set_text("Thoughts")
        with self._body:
            if event.kind == "thinking":
                self._start_thinking("Thinking…")
            elif event.kind == "tool_call":
                with ui.element("div").classes("call") as card:
                    ui.label(event.name).classes("mono call-name")
                    if event.server:
                        ui.label(f"by the server {event.server}").classes("muted small")
                    self._boxes.append(StreamingText("mono text"))
                self._cards[event.call_id] = card
            elif event.kind == "tool_result":
                self._boxes.append(StreamingText())
            else:
                self._boxes.append(MarkdownText())

    def _start_thinking(self, title: str) -> StreamingText:
        self._thinking = ui.expansion(title).classes("w-full muted small thinking").props("dense")
        with self._thinking:
            box = StreamingText("text reasoning")
        self._boxes.append(box)
        return box

    def fail(self, error: ModelyardError) -> None:
        if not self.turn.end:
            self._cut_off("failed", error.message)

    def close(self) -> None:
        """An answer that has not ended by now was stopped, by the button or by leaving the page."""
        if not self.turn.end:
            self._cut_off("stopped", "")

    def _cut_off(self, end: Any, error: str) -> None:
        """Keep the text and the reasoning; a call that is not complete is dropped."""
        parts: list[Part] = []
        for kind, text in self._texts:
            if kind == "thinking":
                parts.append(Thinking(text))
            elif kind == "text" and text:
                parts.append(Text(text))
        self._change(parts=tuple(parts), end=end, error=error, summary=end)

    def _change(self, **changes: Any) -> None:
        self.turn = replace(self.turn, **changes)
        self._view.chat.put(self.turn)

    # --- after the end ------------------------------------------------------------------------------------------------

    @property
    def needs_attention(self) -> bool:
        """Whether the user must see its end: an error, or calls that wait for results."""
        return bool(self.turn.error or any(call.server is None for call in self.turn.calls))

    def show_end(self) -> None:
        self._placeholder.set_visibility(False)
        turn = self.turn
        if self._thinking is not None:
            self._thinking.set_text("Thoughts")
        with self._body:
            if turn.error:
                ui.label(turn.error).classes("error small text").props("role=alert")
            waiting = [call for call in turn.calls if call.id not in self._results and call.server is None]
            if waiting and turn.end == "finished":
                self._ask_for_results(waiting)
        self._footer.clear()
        with self._footer:
            self._show_footer()

    def _show_footer(self) -> None:
        turn, view = self.turn, self._view
        _alternatives(view, turn)
        copy_button(lambda: self.turn.text, "Copy the answer")
        _small_button("refresh", "Answer again", lambda: view.regenerate(self.turn))
        if len(view.chat.round(turn)) > 1 and view.chat.head != turn.id:
            button = ui.button("Continue with this", on_click=lambda: view.select(self.turn))
            button.props("outline no-caps size=sm dense")
        ui.label(turn.summary)
        if turn.request and view.may_see_requests:
            ui.link("view request", f"/requests/req_{turn.request}")

    def _ask_for_results(self, calls: Sequence[ToolCall]) -> None:
        fields = {call.id: ui.textarea(f"Result of {call.name}").props("outlined dense autogrow") for call in calls}
        for field in fields.values():
            field.classes("w-full mt-2 tool-result")

        def send() -> None:
            self._view.send_results(self.turn, {call: field.value or "" for call, field in fields.items()})

        ui.button("Send results", icon="reply", on_click=send).props("outline no-caps size=sm")


class ToolCallCard:
    """A call with its arguments and, once it is known, its result."""

    def __init__(self, call: ToolCall, result: ToolResult | None) -> None:
        with ui.element("div").classes("call"):
            ui.label(call.name).classes("mono call-name")
            ui.label(_indented(call.arguments)).classes("mono text")
            if result is not None:
                _show_result(result)


def _show_result(result: ToolResult) -> None:
    text = "".join(content.text for content in result.content if isinstance(content, Text))
    ui.label("Error" if result.is_error else "Result").classes("caption")
    ui.label(text).classes("mono text")


def _indented(arguments: str) -> str:
    try:
        return msgspec.json.format(arguments, indent=2)
    except msgspec.DecodeError:
        return arguments


class SpeedMeter:
    """Time to first token and tokens per second, as the client sees them."""

    def __init__(self) -> None:
        self._sent = time.perf_counter()
        self._first: float | None = None

    def delta(self) -> None:
        if self._first is None:
            self._first = time.perf_counter()

    def summary(self, usage: Usage) -> str:
        now = time.perf_counter()
        first = self._first if self._first is not None else now
        rate = (usage.output - 1) / (now - first) if usage.output > 1 and now > first else None
        cached = f", {fmt.count(usage.cached)} cached" if usage.cached else ""
        return (
            f"first token {fmt.duration(first - self._sent)} · {fmt.rate(rate)} tok/s · "
            f"{fmt.count(usage.prompt)} prompt{cached} · {fmt.count(usage.output)} output"
        )
