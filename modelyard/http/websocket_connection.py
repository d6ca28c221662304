"""A WebSocket connection: uvicorn's, without the errors that it logs for what a client does."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

_NOT_UTF8 = 1007  # the code of a connection that is closed for it


class WebSocketConnection(WebSocketsSansIOProtocol):
    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True  # it was refused; uvicorn would report that the app sent nothing

    def send_receive_event_to_app(self) -> None:
        """Close the connection of a client whose text is not UTF-8; uvicorn would log a traceback as well."""
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.conn.send_close(_NOT_UTF8)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()
