"""The other gateway processes behind the same port: each has its own request history and captured texts.

Each listens on a unix socket in a folder that only this user can access. Requests are forwarded with the client's key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from modelyard.accounts.owner import OWNER_HEADER

if TYPE_CHECKING:
    import httpx

Json = dict[str, Any]

_TIMEOUT_S = 10.0  # long enough for a busy peer
_FORWARDED = ("authorization", "x-api-key", OWNER_HEADER)


class PeerGateways:
    """`own` is this process's socket; the others' are in the same folder. Empty: there are no others."""

    def __init__(self, own: str = "") -> None:
        self._own = Path(own) if own else None
        self._clients: dict[Path, httpx.AsyncClient] = {}

    def _others(self) -> list[Path]:
        if self._own is None:
            return []
        prefix = self._own.name.rpartition("-")[0]
        return sorted(each for each in self._own.parent.glob(f"{prefix}-*") if each != self._own)

    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> list[Json]:
        """The replies of all peers that answer; one that is being restarted does not."""
        forwarded = {name: headers[name] for name in _FORWARDED if name in headers}
        others = await asyncio.to_thread(self._others) if self._own is not None else []
        replies = await asyncio.gather(*(self._request_one(other, method, path, forwarded, body) for other in others))
        return [each for each in replies if each is not None]

    async def _request_one(
        self, other: Path, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Json | None:
        import httpx  # slow to import, and only several processes need it

        url = f"/v1/admin/{path}{'&' if '?' in path else '?'}own=true"  # the peer must not ask us in turn
        sent = {"content-type": "application/json", **headers}
        try:
            reply = await self._client(other).request(method, url, headers=sent, content=body)
            return msgspec.json.decode(reply.content, type=Json) if reply.status_code == 200 else None
        except (httpx.HTTPError, msgspec.DecodeError):
            return None

    def _client(self, other: Path) -> httpx.AsyncClient:
        import httpx

        if other not in self._clients:
            transport = httpx.AsyncHTTPTransport(uds=str(other), verify=False)
            self._clients[other] = httpx.AsyncClient(
                transport=transport, base_url="http://localhost", timeout=_TIMEOUT_S, trust_env=False
            )
        return self._clients[other]

    async def close(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()


def merge_requests(own: Json, others: list[Json], limit: int) -> Json:
    """The requests of all gateways as one list. With a shared scheduler each gateway knows all live ones."""
    live: dict[str, Json] = {}
    for one in (one for each in (own, *others) for one in each["live"]):
        if one["id"] not in live or one["progress"] is not None:  # the gateway that runs it knows its progress
            live[one["id"]] = one
    ended = sorted((one for each in (own, *others) for one in each["ended"]), key=lambda one: -one["at"])
    return {"live": list(live.values()), "ended": ended[:limit]}
