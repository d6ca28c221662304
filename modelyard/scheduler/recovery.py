"""What is done about engines that were lost: opened again, ever later, and given up at last."""

from __future__ import annotations

import logging
from functools import partial
from typing import Protocol

from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.scheduler.model import Pooled
from modelyard.scheduler.replica import Replica
from modelyard.scheduler.timers import Timers

log = logging.getLogger(__name__)

_DELAYS_S = (0.0, 0.5, 2.0, 5.0)  # before each reopening; after the last the replica is given up
_PROVEN_S = 60.0  # an engine that was up for so long did not die of being opened


class Keeper(Protocol):
    """Who has the replicas."""

    def begin(self, replica: Replica) -> None: ...
    def give_up(self, model: Pooled, replica: Replica, error: ModelyardError) -> None: ...
    def refuse(self, model: Pooled, error: ModelyardError) -> None: ...


class Recovery:
    """`timeout_s` is how long requests wait for a model whose engines are all away."""

    def __init__(self, keeper: Keeper, timers: Timers, timeout_s: float) -> None:
        self._keeper, self._timers, self._timeout_s = keeper, timers, timeout_s

    def failed(self, model: Pooled, replica: Replica, error: ModelyardError) -> None:
        """It could not be opened. A first load is not tried again: what is wrong with it will still be wrong."""
        if replica.restarts:
            self._try_again(model, replica, error)
        else:
            self._keeper.give_up(model, replica, error)

    def lost(self, model: Pooled, replica: Replica, error: ModelyardError) -> None:
        log.warning("the engine of %s was lost: %s", model.name, error.message)
        now = self._timers.now()
        model.up.remove(replica)
        model.reason, model.failures = error.message, model.failures + 1
        if replica.granted or now - replica.ready_since > _PROVEN_S:
            replica.restarts = 0  # it worked: this death begins a new count
        if not model.up and model.down_since is None:
            model.down_since = now
            self._timers.later(self._timeout_s, partial(self._turn_away, model, now))
        self._try_again(model, replica, error)

    def _try_again(self, model: Pooled, replica: Replica, error: ModelyardError) -> None:
        if replica.restarts == len(_DELAYS_S):
            self._keeper.give_up(model, replica, error)
            return
        replica.state, replica.reason, replica.since = "restarting", error.message, self._timers.unix()
        delay = _DELAYS_S[replica.restarts]
        replica.restarts += 1
        if delay:
            self._timers.later(delay, partial(self._reopen, replica))
        else:
            self._reopen(replica)

    def _reopen(self, replica: Replica) -> None:
        if replica.state == "restarting":  # and not told to close in the meantime
            self._keeper.begin(replica)

    def _turn_away(self, model: Pooled, since: float) -> None:
        """Those who wait for this very outage have waited long enough."""
        if model.down_since == since:
            self._keeper.refuse(model, Unavailable(f"the engine of {model.name!r} was lost: {model.reason}"))
