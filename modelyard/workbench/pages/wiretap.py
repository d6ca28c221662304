"""What goes over the wire, beside the conversation: the request as sent, the events as they come, and snippets."""

from __future__ import annotations

import codecs

from nicegui import ui

from modelyard.core.protocol import WireProtocol
from modelyard.workbench.client import Client
from modelyard.workbench.parts import Flow, Pane
from modelyard.workbench.talk import curl, pretty, python


class Wiretap:
    def __init__(self) -> None:
        with ui.tabs().props("dense no-caps align=left").classes("w-full") as tabs:
            for name in ("Request", "Events", "curl", "Python"):
                ui.tab(name)
        with ui.tab_panels(tabs, value="Request", keep_alive=True).classes("w-full").props("animated=false"):
            with ui.tab_panel("Request").classes("px-0"):
                self._sent = Pane("Nothing was sent yet.")
            with ui.tab_panel("Events").classes("px-0"), ui.element("div").classes("well mono sse"):
                self._came = Flow()
            with ui.tab_panel("curl").classes("px-0"):
                self._curl = Pane()
            with ui.tab_panel("Python").classes("px-0"):
                self._python = Pane()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def begin(self, client: Client, wire: WireProtocol, body: bytes) -> None:
        path, keyed = wire.PATHS[0], bool(client.key)
        self._sent.show(f"POST {path}\n\n{pretty(body)}")
        self._curl.show(curl(client.url, path, body, keyed))
        self._python.show(python(client.url, path, body, keyed))
        self._came.clear()
        self._decoder.reset()

    def saw(self, data: bytes) -> None:
        self._came.add(self._decoder.decode(data))

    def flush(self) -> None:
        self._came.flush()
