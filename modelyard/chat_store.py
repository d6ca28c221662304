"""The chats of the workbench, in one SQLite file: stored until they are deleted, and scoped by API key."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from modelyard.core.chat import Chat, ChatSummary
from modelyard.core.errors import Conflict, NotFound, TooLarge
from modelyard.database import Database, DatabaseKind, DatabaseThread
from modelyard.library.cache_dir import data_dir

_SCHEMA = (
    """CREATE TABLE chats (
        scope TEXT NOT NULL, id TEXT NOT NULL, title TEXT NOT NULL, updated REAL NOT NULL, turns INTEGER NOT NULL,
        revision INTEGER NOT NULL, text TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (scope, id)
    )""",
    "CREATE INDEX chats_by_time ON chats (scope, updated)",
)
_KIND = DatabaseKind(0x4D594348, _SCHEMA, "the file of the chats", "store.chats")
_FIND = """SELECT id, title, updated, turns FROM chats WHERE scope = ? AND text LIKE ? ESCAPE '\\'
    ORDER BY updated DESC LIMIT ?"""
_GET = "SELECT body FROM chats WHERE scope = ? AND id = ?"
_REVISION = "SELECT revision FROM chats WHERE scope = ? AND id = ?"
_PUT = "INSERT OR REPLACE INTO chats VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_SIZE = "SELECT coalesce(sum(length(body)), 0) FROM chats WHERE scope = ? AND id != ?"
_MAX_BYTES = 256 << 20  # of the chats of one key
_DELETE = "DELETE FROM chats WHERE scope = ? AND id = ?"


def default_path(env: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    return data_dir(env, platform) / "chats.sqlite"


class ChatStore:
    """`scope` is the name of an API key."""

    def __init__(self, path: Path) -> None:
        self._database = Database(path, _KIND)
        self._thread = DatabaseThread(self._database, "chats")

    async def find(self, scope: str, search: str, limit: int) -> list[ChatSummary]:
        """The newest first. `search`: only those that contain this text, in upper or lower case."""
        return await self._thread.run(self._find, scope, search, limit)

    async def get(self, scope: str, id: str) -> Chat:
        return await self._thread.run(self._get, scope, id)

    async def put(self, scope: str, chat: Chat) -> Chat:
        """Returns the chat with its new revision. Raises if another version was stored since it was read."""
        return await self._thread.run(self._put, scope, chat)

    async def delete(self, scope: str, id: str) -> None:
        await self._thread.run(self._delete, scope, id)

    async def close(self) -> None:
        await self._thread.close()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _find(self, scope: str, search: str, limit: int) -> list[ChatSummary]:
        escaped = "".join(f"\\{letter}" if letter in "\\%_" else letter for letter in search.casefold())
        with self._database.opened() as db:
            return [ChatSummary(*row) for row in db.execute(_FIND, (scope, f"%{escaped}%", limit))]

    def _get(self, scope: str, id: str) -> Chat:
        with self._database.opened() as db:
            row = db.execute(_GET, (scope, id)).fetchone()
        if row is None:
            raise _unknown(id)
        return msgspec.json.decode(row[0], type=Chat)

    def _put(self, scope: str, chat: Chat) -> Chat:
        with self._database.transaction() as db:
            row = db.execute(_REVISION, (scope, chat.id)).fetchone()
            if row is not None and row[0] != chat.revision:
                message = f"the chat {chat.id!r} was changed elsewhere: read it again, then change it"
                raise Conflict(message, code="chat_changed", param="revision")
            chat.revision += 1
            text, body = chat.search_text().casefold(), msgspec.json.encode(chat)
            if len(body) + db.execute(_SIZE, (scope, chat.id)).fetchone()[0] > _MAX_BYTES:
                raise TooLarge(f"the stored chats of this key would take more than {_MAX_BYTES >> 20} MiB: delete some")
            values = (scope, chat.id, chat.display_title, chat.updated, len(chat.turns), chat.revision, text, body)
            db.execute(_PUT, values)
        return chat

    def _delete(self, scope: str, id: str) -> None:
        with self._database.transaction() as db:
            if not db.execute(_DELETE, (scope, id)).rowcount:
                raise _unknown(id)


def _unknown(id: str) -> NotFound:
    return NotFound(f"no chat {id!r} is stored", code="chat_not_found")
