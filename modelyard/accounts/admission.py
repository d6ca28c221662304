"""The admission ledger: what the requests that are in this process may take at worst, in bytes and in tokens.

A request reserves before it works, and returns all of it at its end:

- bytes of memory: its body, the files and stored turns that it names, and what its prompt becomes. They are bounded for
  all requests and for those of one key, which may take half of that;
- tokens and cost of its key's budget (`usage.py`): those of its prompt, and as many as it may write. An answer gets no
  more tokens than are left, so requests that run at the same time cannot exceed a budget together. They are held in
  the file of accounts, which all processes of a server share; a key without a budget pays nothing for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from modelyard.accounts.usage import UsageLedger
from modelyard.core.errors import KeyLimited, Overloaded, TooLarge

if TYPE_CHECKING:
    from modelyard.accounts.accounts import Accounts

# A prompt of 1 MB that waits takes 5.7 MB: the body, its strings, the rendered text, and 40 bytes for each token.
_COPIES = 6
_RETRY_S = 2.0


class Admission:
    """`limit` is in bytes; None: unlimited. `reserved` are bytes by key, `freed` those since somebody has looked.
    `shared`: None if this process alone has the budgets."""

    def __init__(self, ledger: UsageLedger, clock: Callable[[], float], limit: int | None = None) -> None:
        self.ledger, self.clock, self.limit = ledger, clock, limit
        self.reserved: Counter[str] = Counter()
        self.total = self.freed = 0
        self.shared: Accounts | None = None

    def open(self, key: str) -> RequestReservation:
        return RequestReservation(self, key)


class RequestReservation:
    """What one request has reserved. `release` returns it; idempotent."""

    __slots__ = ("_admission", "_bytes", "_cost", "_hold", "_is_released", "_key", "_tokens")

    def __init__(self, admission: Admission, key: str) -> None:
        self._admission, self._key = admission, key
        self._bytes, self._tokens, self._cost = 0, 0, 0.0
        self._hold: int | None = None  # its number in `shared`
        self._is_released = False

    def grow(self, size: int) -> None:
        """For a prompt that has `size` bytes more. Raises if there is no room."""
        ledger, limit, key, size = self._admission, self._admission.limit, self._key, size * _COPIES
        if limit is not None:
            most, mine, wanted = limit // 2 if key else limit, ledger.reserved[key], self._bytes + size
            if wanted > most:
                raise TooLarge(
                    f"the request would take {wanted >> 20} MiB of memory, with its files and its prompt; at most "
                    f"{most >> 20} MiB are allowed: send less, or set http.max_memory_bytes higher"
                )
            if mine + size > most:
                taken = f"the requests of this key that wait or run take {mine >> 20} of {most >> 20} MiB"
                raise KeyLimited(f"{taken}: wait for one of them, or send less at a time", retry_after=_RETRY_S)
            if ledger.total + size > limit:
                taken = f"the requests that wait or run take {ledger.total >> 20} of {limit >> 20} MiB"
                raise Overloaded(f"{taken}; try again later", retry_after=_RETRY_S)
        ledger.reserved[key] += size
        ledger.total += size
        self._bytes += size

    async def hold(self, model: str, prompt: int, output: int, choices: int = 1) -> int:
        """The tokens that each reply may have, at most `output`. Replaces what an earlier round held. Raises if the
        budget has no room for one."""
        self._free()
        ledger, shared, now = self._admission.ledger, self._admission.shared, self._admission.clock()
        most, self._tokens, self._cost = ledger.hold(self._key, model, prompt, output, choices, now)
        if not self._tokens or shared is None:
            return most
        try:
            self._hold, (most, tokens, cost) = await shared.hold(self._key, model, prompt, most, choices)
        except BaseException:
            self._free()
            raise
        if self._is_released:
            self._free()
        else:
            ledger.free(self._key, self._tokens - tokens, self._cost - cost)
            self._tokens, self._cost = tokens, cost
        return most

    def release(self) -> None:
        self._is_released = True
        if self._bytes:
            ledger, key, size, self._bytes = self._admission, self._key, self._bytes, 0
            ledger.total -= size
            ledger.freed += size
            ledger.reserved[key] -= size
            if not ledger.reserved[key]:
                del ledger.reserved[key]
        if self._tokens or self._hold is not None:
            self._free()

    def _free(self) -> None:
        if self._tokens:
            self._admission.ledger.free(self._key, self._tokens, self._cost)
            self._tokens, self._cost = 0, 0.0
        if self._hold is not None and self._admission.shared is not None:
            self._admission.shared.end_hold(self._hold)
            self._hold = None
