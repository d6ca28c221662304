"""The other gateway processes of a fleet, asked for what each of them alone remembers: its requests and their texts.

Each has a second way in, a unix socket in a folder that only this user may enter. Whoever asks shows his own key there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

Json = dict[str, Any]

_PATIENCE_S = 10.0  # one that is only busy is waited for: without it the list would not be whole
_SHOWN = ("authorization", "x-api-key")  # what says who asks


class PeerGateways:
    """`own` is this process's own socket; those of the others lie beside it. Empty: there are no others."""

    def __init__(self, own: str = "") -> None:
        self._own = Path(own) if own else None
        self._clients: dict[Path, httpx.AsyncClient] = {}

    def _others(self) -> list[Path]:
        if self._own is None:
            return []
        alike = self._own.name.rpartition("-")[0]
        return sorted(each for each in self._own.parent.glob(f"{alike}-*") if each != self._own)

    async def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> list[Json]:
        """Of each that answers, and has something to say; one that is just being started again has nothing."""
        shown = {name: headers[name] for name in _SHOWN if name in headers}
        others = await asyncio.to_thread(self._others) if self._own is not None else []
        told = await asyncio.gather(*(self._one(other, method, path, shown, body) for other in others))
        return [each for each in told if each is not None]

    async def _one(
        self, other: Path, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Json | None:
        url = f"/v1/admin/{path}{'&' if '?' in path else '?'}own=true"  # so that nobody asks us in turn
        told = {"content-type": "application/json", **headers}
        try:
            reply = await self._client(other).request(method, url, headers=told, content=body)
            return msgspec.json.decode(reply.content, type=Json) if reply.status_code == 200 else None
        except (httpx.HTTPError, msgspec.DecodeError):
            return None

    def _client(self, other: Path) -> httpx.AsyncClient:
        if other not in self._clients:
            transport = httpx.AsyncHTTPTransport(uds=str(other), verify=False)
            self._clients[other] = httpx.AsyncClient(
                transport=transport, base_url="http://localhost", timeout=_PATIENCE_S, trust_env=False
            )
        return self._clients[other]

    async def close(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()


def merge_requests(own: Json, others: list[Json], limit: int) -> Json:
    """Everybody's requests as one list. Those that run are known to each of them where they have one scheduler."""
    live = {one["id"]: one for each in (*others, own) for one in each["live"]}
    ended = sorted((one for each in (own, *others) for one in each["ended"]), key=lambda one: -one["at"])
    return {"live": list(live.values()), "ended": ended[:limit]}
