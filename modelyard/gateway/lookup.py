"""Which model a request gets: the target of its route, the model, and its engine if it is loaded. Raises if the caller
may not use it. A reload replaces `router` and `models`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

import msgspec

from modelyard.accounts.keys import may_use
from modelyard.core.engine import Capabilities, Engine
from modelyard.core.errors import Forbidden, Unavailable
from modelyard.core.pool import LeaseProvider
from modelyard.core.request import Caller, is_api_key
from modelyard.gateway.model import CapabilityCache, Model
from modelyard.router.router import Router, Target


class ModelLookup:
    def __init__(self, router: Router, models: Mapping[str, Model], leases: LeaseProvider) -> None:
        self.router, self.models, self._leases = router, models, leases
        self.capabilities = CapabilityCache()
        self._defining: dict[str, asyncio.Future[Model]] = {}

    def find(self, name: str, caller: Caller, consent: bool = False) -> tuple[Target, Model, Engine | None]:
        """`consent`: the request itself agrees to be sent to another server."""
        return self.admit(self.router.resolve(name, caller.endpoint), name, caller, consent)

    def admit(self, target: Target, name: str, caller: Caller, consent: bool) -> tuple[Target, Model, Engine | None]:
        """The target with the window that it was loaded with. Raise if the caller may not use it."""
        if caller.allowed and not may_use(caller.allowed, target.model, target.cache, target.route):
            raise Forbidden(f"the key {caller.key!r} may not use the model {name!r}", code="model_not_allowed")
        model = self.models.get(target.model)
        if model is None:  # resolved before a reload
            raise Unavailable(f"the model {target.model!r} is no longer configured", code="model_gone")
        if model.remote and not _may_leave(caller, target, consent):
            raise _remote_not_allowed(name, caller)
        engine = self._leases.engine(target.model)
        return _with_loaded_window(target, engine), model, engine

    async def defined(self, model: Model) -> Model:
        """A model of the library is defined at its first request: reading all of them would delay the start."""
        name, define = model.name, model.define
        if define is None:
            return model
        if (work := self._defining.get(name)) is None:
            work = self._defining[name] = asyncio.ensure_future(asyncio.to_thread(define))
            work.add_done_callback(lambda _: self._defining.pop(name, None))
        defined = await asyncio.shield(work)
        if self.models.get(name) is model:  # otherwise the configuration was reloaded meanwhile
            self.models = {**self.models, name: defined}
        return defined

    def effective(self, model: Model, engine: Engine | None) -> Capabilities:
        """What the model can do, on its engine if that is loaded."""
        return self.capabilities.effective(model, None if engine is None else engine.info.capabilities)

    # --- names and models as clients see them ---------------------------------------------------------------------

    def target(self, name: str, endpoint: str) -> Target:
        """Where requests for this name go, with the window that the cache was loaded with."""
        target = self.router.resolve(name, endpoint)
        return _with_loaded_window(target, self._leases.engine(target.model))

    def names(self, allowed: tuple[str, ...], endpoint: str) -> Sequence[str]:
        """The public names of models that a key with these `allowed` may use."""
        names = self.router.names()
        if not allowed:
            return names
        targets = {name: self.router.resolve(name, endpoint) for name in names}
        return [name for name, at in targets.items() if may_use(allowed, at.model, at.cache, at.route)]

    def visible_models(self, allowed: tuple[str, ...]) -> Collection[str]:
        """The models that a key with these `allowed` may know of."""
        if not allowed:
            return self._leases.status().keys()
        return {self.router.resolve(name, "").model for name in self.names(allowed, "")}

    async def find_defined(self, name: str, caller: Caller) -> tuple[Target, Model]:
        """With its tokenizer and template."""
        target, model, _ = self.find(name, caller)
        return target, await self.defined(model)

    def has_window(self, model: str) -> bool:
        """Whether its window is known: that of a remote model may not be set, and the default says nothing about it."""
        entry = self.router.catalog.models.get(model)
        return entry is None or entry.has_window or not self.models[model].remote


def _may_leave(caller: Caller, target: Target, consent: bool) -> bool:
    """Whether the request may be sent to another server. What a key may do is not the request's decision: its own
    consent counts only on a server without keys."""
    if caller.forbid_remote:
        return False
    return target.allow_remote or caller.allow_remote or (consent and not is_api_key(caller.key))


def _remote_not_allowed(name: str, caller: Caller) -> Forbidden:
    how = "send the header x-modelyard-allow-remote: true (in the pool dialect also the field allow_remote), or set"
    if has_key := is_api_key(caller.key):
        how = f"the key {caller.key!r} may not use it; the administrator can set"
    where = "your key" if caller.forbid_remote else "its route or your key" if has_key else "its route"
    return Forbidden(
        f"the model {name!r} runs on a remote service; {how} allow_remote = true on {where}", code="remote_not_allowed"
    )


def _with_loaded_window(target: Target, engine: Engine | None) -> Target:
    """A load may have set another window than the configuration."""
    cache = engine.info.caches.get(target.cache) if engine is not None else None
    if cache is None or cache.window == target.window:
        return target
    return msgspec.structs.replace(target, window=cache.window)
