"""A place that can be taken away again, and who is to end the work in it."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from modelyard.core.errors import ModelyardError


class Revocable(Struct, eq=False, kw_only=True):
    """The part of a `Lease` that is the same wherever it is granted. A Struct, because one is made at every request:
    an `__init__` costs more than all else that is done with it."""

    _revokers: tuple[Callable[[ModelyardError], None], ...] = ()
    _revoked: ModelyardError | None = None

    def on_revoke(self, end: Callable[[ModelyardError], None]) -> None:
        if self._revoked is not None:
            end(self._revoked)
        else:
            self._revokers += (end,)

    def revoke(self, why: ModelyardError) -> None:
        """Ends the work in it, once. Whoever has not said yet how that is done hears of it when he does."""
        if self._revoked is None:
            self._revoked = why
            revokers, self._revokers = self._revokers, ()
            for end in revokers:
                end(why)
