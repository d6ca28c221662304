"""Small pieces that several pages are made of. Nothing here renders HTML: what somebody wrote is text."""

from __future__ import annotations

from collections.abc import Iterable

from nicegui import ui
from nicegui.elements.label import Label

from modelyard.workbench import look

_CHUNK = 1500  # characters of one element: what is appended to a long text must not send all of it again
_MOST = 400_000


def heading(title: str, about: str = "") -> None:
    with ui.column().classes("gap-0"):
        ui.label(title).classes("title").props("role=heading aria-level=1")
        if about:
            ui.label(about).classes("faint")


def caps(text: str) -> Label:
    return ui.label(text).classes("caps")


def card() -> ui.element:
    return ui.element("section").classes("card")


class Figure:
    """A number with its name."""

    def __init__(self, name: str, style: str = "figure") -> None:
        with ui.column().classes("gap-0"):
            caps(name)
            self._label = ui.label("–").classes(style)

    def show(self, text: str) -> None:
        self._label.set_text(text)


class State:
    """A dot and a word."""

    def __init__(self) -> None:
        with ui.element("div").classes("state"):
            self._dot = ui.element("div").classes("dot")
            self._word = ui.label("")
        self._now = ""

    def show(self, state: str) -> None:
        if state == self._now:
            return
        old = f"bg-{look.STATES.get(self._now, 'negative')} busy"
        busy = " busy" if state in ("loading", "draining", "running", "waiting") else ""
        self._dot.classes(remove=old, add=f"bg-{look.STATES.get(state, 'negative')}{busy}")
        self._word.set_text(state)
        self._now = state


class Flow:
    """A text that grows: appending sends the last piece, not the whole. Bounded, and it says where it was cut."""

    def __init__(self, classes: str = "text") -> None:
        self._box = ui.element("div").classes(classes)
        self._tail: Label | None = None
        self._tail_text, self._held, self._size = "", "", 0

    @property
    def box(self) -> ui.element:
        return self._box

    def add(self, text: str) -> None:
        """Held back until `flush`: many small pieces become one message."""
        self._held += text

    def flush(self) -> bool:
        if not self._held or self._box.is_deleted:
            return False
        text, self._held = self._held, ""
        if self._size > _MOST:
            return False
        self._size += len(text)
        self._append(text if self._size <= _MOST else text + "\n[the rest is too long to show]")
        return True

    def _append(self, text: str) -> None:
        if self._tail is None or len(self._tail_text) > _CHUNK:
            with self._box:
                self._tail, self._tail_text = Label(""), ""
                self._tail.style("display: inline")
        self._tail_text += text
        self._tail.set_text(self._tail_text)

    def clear(self) -> None:
        self._box.clear()
        self._tail, self._tail_text, self._held, self._size = None, "", "", 0


class Pane:
    """A well of monospaced text with a button that copies it."""

    def __init__(self, text: str = "") -> None:
        self._text = text
        with ui.element("div").classes("w-full").style("position: relative"):
            with ui.element("div").classes("well mono"):
                self._label = ui.label(text).classes("text")
            button = ui.button(icon="content_copy", on_click=self._copy)
            button.props('flat round dense size=sm color=grey aria-label="Copy"')
            button.style("position: absolute; top: 6px; right: 6px")

    def _copy(self) -> None:
        ui.clipboard.write(self._text)
        ui.notify("Copied", timeout=1200)

    def show(self, text: str) -> None:
        self._text = text
        self._label.set_text(text)


def tags(words: Iterable[str]) -> None:
    with ui.element("div").classes("line"):
        for word in words:
            ui.label(word).classes("tag")


def nothing(text: str) -> Label:
    return ui.label(text).classes("faint").style("padding: 24px 0")
