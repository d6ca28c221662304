"""What administrators order: load, unload, drain, scale, and a new configuration.

Every order changes what is wanted and has the depot look; it is done when the pool has become what was ordered. Orders
are looked at after every change, so it does not matter who or what brought the pool there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from modelyard.core.errors import Conflict, InvalidRequest, Unavailable
from modelyard.core.pool import ModelSpec, Overrides
from modelyard.scheduler.depot import Depot
from modelyard.scheduler.model import Order, Pooled
from modelyard.scheduler.place import Place
from modelyard.scheduler.timers import Timers


class Orders:
    def __init__(self, depot: Depot, timers: Timers) -> None:
        self._depot, self._timers = depot, timers

    def preload(self, model: Pooled) -> None:
        model.wanted = model.blueprint.replicas
        self._depot.look_soon()

    def load(self, model: Pooled, overrides: Overrides | None) -> asyncio.Future[None]:
        wanted = dict(overrides or {})
        if wanted != model.overrides and (overrides is not None or not model.replicas):
            self._alter(model, wanted)
        model.drained = model.failed = model.sleeping = False
        model.wanted = model.wanted or model.blueprint.replicas
        return self._order(model, lambda: bool(model.up), loads=True)

    def _alter(self, model: Pooled, overrides: Overrides) -> None:
        if model.replicas:
            raise Conflict(
                f"the model {model.name!r} is loaded with other settings; unload it first", code="model_loaded"
            )
        altered = model.blueprint.altered
        if overrides and altered is None:
            raise InvalidRequest(f"nothing can be overridden when {model.name!r} is loaded", code="bad_override")
        model.current = altered(overrides) if overrides and altered is not None else model.blueprint
        model.overrides = overrides
        model.need = None if model.current.estimate is not None else {}

    def unload(self, model: Pooled, revoked: Iterable[Place] | None) -> asyncio.Future[None]:
        """`revoked` are those who must not finish; None: they may."""
        why = Unavailable(f"the model {model.name!r} was unloaded", code="model_unloaded")
        model.wanted, model.reason, model.down_since = 0, "", None
        model.sleeping = model.drained = model.failed = False
        self._depot.end_orders(model, Conflict(f"the model {model.name!r} was unloaded before it was ready"))
        self._depot.refuse(model, why)
        for place in revoked or ():
            place.revoke(why)
        for replica in list(model.replicas) if revoked is not None else ():
            self._depot.stop(model, replica, force=True)
        return self._order(model, lambda: not model.replicas)

    def drain(self, model: Pooled) -> asyncio.Future[None]:
        if not model.wanted:
            raise Conflict(f"the model {model.name!r} is not loaded", code="model_not_loaded")
        model.drained = True
        return self._order(model, lambda: not model.running and not model.waiting)

    def scale(self, model: Pooled, replicas: int) -> asyncio.Future[None]:
        most = model.blueprint.replica_max
        if not 1 <= replicas <= most:
            message = f"{model.name!r} may have 1 to {most} replicas: replica_max sets the most, unload takes all away"
            raise InvalidRequest(message, param="replicas", code="replicas_out_of_range")
        model.wanted, model.failed, model.sleeping = replicas, False, False
        return self._order(model, lambda: len(model.up) == replicas == len(model.replicas), loads=True)

    def _order(self, model: Pooled, met: Callable[[], bool], *, loads: bool = False) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_seen)
        model.orders.append(Order(done, self._timers.now(), met, loads))
        self._depot.look()
        return done

    # --- a new configuration ------------------------------------------------------------------------------------------

    def reconfigure(self, blueprints: Mapping[str, ModelSpec]) -> None:
        models = self._depot.models
        known = bool(models)  # the first models of all are made known before a loop runs
        for name, model in list(models.items()):
            new = blueprints.get(name)
            if new is not None and new.identity and new.identity == model.blueprint.identity:
                _adjust(model, new)
                model.admit_all(self._timers.now())
            else:
                self._replace(model, new)
        for name, blueprint in blueprints.items():
            if name not in models:
                self._depot.add(blueprint).wanted = blueprint.replicas if known and blueprint.enabled else 0
            models[name] = models.pop(name)  # in the order of the new configuration
        if known:
            self._depot.look_soon()

    def _replace(self, model: Pooled, new: ModelSpec | None) -> None:
        wanted = model.wanted
        self._depot.retire(model)
        self._depot.end_orders(model, Conflict(f"the configuration of {model.name!r} was changed while it was loaded"))
        if new is not None:
            self._depot.add(new).wanted = new.replicas if wanted else 0


def _adjust(model: Pooled, new: ModelSpec) -> None:
    """The same engine: it goes on, and only how it is run changes."""
    if model.wanted and new.replicas != model.blueprint.replicas:
        model.wanted = new.replicas
    model.blueprint = new
    if not model.overrides:
        model.current = new
        for replica in model.replicas:
            replica.adjust(new)


def _seen(done: asyncio.Future[None]) -> None:
    """Nobody has to await an order: an error that nobody reads is none of the loop's business."""
    if not done.cancelled():
        done.exception()
