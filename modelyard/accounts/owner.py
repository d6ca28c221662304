"""Who may do what, and how the user who runs a server proves it.

A server makes a token at its start and leaves it in a file that only its user can read. Codes for the link of the
workbench and the cookie of its pages are made from it, so whoever has the token can make a link.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Literal, get_args

# Each may do what those before it may. "local": everyone on the machine of a loopback server without keys.
Role = Literal["member", "local", "operator", "owner"]
OWNER_HEADER = "x-modelyard-owner"
USER_HEADER = "x-modelyard-user"  # beside the token: the page asks for this user of the machine, not for the owner
_CODE_S = 3600.0
_RANKS = {role: rank for rank, role in enumerate(get_args(Role))}


def includes(role: Role, needed: Role) -> bool:
    return _RANKS[role] >= _RANKS[needed]


class OwnerProof:
    """The token of one server. The process that serves the workbench knows which codes were used."""

    def __init__(self, token: str = "") -> None:
        self.token = token or secrets.token_urlsafe(32)
        self.cookie = self._sign("cookie")
        self._used: dict[str, float] = {}  # code: until when it would be valid

    def __repr__(self) -> str:
        return "<OwnerProof>"

    def is_proved(self, sent: str) -> bool:
        return _same(sent, self.token)

    def has_cookie(self, sent: str) -> bool:
        return _same(sent, self.cookie)

    def new_code(self, now: float) -> str:
        code = f"{int(now + _CODE_S)}-{secrets.token_hex(8)}"
        return f"{code}-{self._sign(code)}"

    def redeem(self, code: str, now: float) -> bool:
        """Whether it is a valid code: each is once."""
        self._used = {used: until for used, until in self._used.items() if until > now}
        content, _, signature = code.rpartition("-")
        if not _same(signature, self._sign(content)) or code in self._used:
            return False
        until = float(content.partition("-")[0])
        self._used[code] = until
        return until > now

    def _sign(self, text: str) -> str:
        return hmac.digest(self.token.encode(), text.encode("utf-8", "replace"), "sha256").hex()


def _same(sent: str, known: str) -> bool:
    return hmac.compare_digest(sent.encode("utf-8", "replace"), known.encode())
