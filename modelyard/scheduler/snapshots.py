"""The pool as administrators see it: records turned into values."""

from __future__ import annotations

from collections.abc import Iterable

from modelyard.core.pool import DeviceSnapshot, ModelSnapshot, ReplicaSnapshot, RequestSnapshot
from modelyard.scheduler.model import Pooled
from modelyard.scheduler.place import Place
from modelyard.scheduler.placement import Bytes
from modelyard.scheduler.replica import Replica
from modelyard.scheduler.timers import Timers


def of_model(model: Pooled, timers: Timers) -> ModelSnapshot:
    lanes, now = model.lanes.values(), timers.now()
    services = [lane.service_s for lane in lanes if lane.service_s is not None]
    oldest = min((since for lane in lanes if (since := lane.oldest()) is not None), default=None)
    status = model.status
    return ModelSnapshot(
        name=model.name,
        state=status.state,
        reason=model.reason,
        doing=model.doing,
        progress=model.progress,
        waiting=status.waiting,
        waiting_tokens=model.waiting_tokens,
        running=model.running,
        places=sum(one.most for one in model.up),
        replicas=tuple(map(of_replica, model.replicas)),
        replicas_wanted=model.wanted,
        replica_max=model.blueprint.replica_max,
        target_inflight=model.blueprint.target_inflight,
        autoload=model.blueprint.autoload,
        idle_ttl_s=model.blueprint.idle_ttl_s,
        loads_on_request=status.loads_on_request,
        capabilities=status.capabilities,
        caches=model.current.caches,
        overrides=model.overrides,
        estimate=model.estimate,
        measured=model.measured,
        load_s=model.load_s,
        loads=model.loads,
        failures=model.failures,
        evictions=model.evictions,
        last_used=None if model.used is None else timers.unix() - (now - model.used),
        service_s=sum(services) / len(services) if services else None,
        wait_s=None if oldest is None else now - oldest,
    )


def of_replica(one: Replica) -> ReplicaSnapshot:
    return ReplicaSnapshot(
        id=one.id,
        state=one.state,
        running=one.running,
        since=one.since,
        progress=one.progress,
        doing=one.doing,
        reason=one.reason,
        pid=one.pid,
    )


def of_request(place: Place, timers: Timers) -> RequestSnapshot:
    demand, age = place.demand, timers.now() - place.since
    return RequestSnapshot(
        trace=demand.trace,
        model=place.model.name,
        cache=demand.cache,
        state="running" if place.granted else "waiting",
        key=demand.key,
        session=demand.session,
        priority=demand.priority,
        tokens=demand.tokens,
        weight=place.weight,
        position=place.position,
        replica=None if place.replica is None else place.replica.id,
        since=timers.unix() - age,
        waited=place.waited if place.granted else age,
    )


def of_devices(hard: Bytes, held: Iterable[Bytes]) -> tuple[DeviceSnapshot, ...]:
    taken: dict[str, int] = dict.fromkeys(hard, 0)
    for bytes_ in held:
        for device, amount in bytes_.items():
            taken[device] = taken.get(device, 0) + amount
    return tuple(DeviceSnapshot(device, hard.get(device), amount) for device, amount in taken.items())
