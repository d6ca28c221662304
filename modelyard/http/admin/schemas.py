"""The pool's records as the admin API's JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

import msgspec

from modelyard.core.engine import CacheStats, Capabilities, Engine, MemoryEstimate
from modelyard.core.pool import DeviceSnapshot, ModelStatus, PoolSnapshot, RequestSnapshot
from modelyard.gateway.running import RunningRequest
from modelyard.router.router import Target
from modelyard.telemetry.history import INTERVAL_S, HistoryInterval, RequestRecord
from modelyard.telemetry.request_capture import CapturedRequest
from modelyard.telemetry.system import MachineMemory

Json = dict[str, Any]


def model(seen: ModelStatus, about: Json, can: Capabilities, log: Iterable[str], *, has_window: bool) -> Json:
    """`about`: what the pool does not know, as `AdminOperations.describe` has it."""
    caches: Json = msgspec.to_builtins(seen.caches)
    return {
        "id": seen.name,
        "object": "model",
        "state": seen.state,
        "loaded": seen.state in ("ready", "draining"),
        "reason": seen.reason,
        "phase": seen.phase,
        "progress": seen.progress,
        "backend": about["backend"],
        "aliases": about["aliases"],
        "description": about["description"],
        "queue": _queue(seen),
        "replicas": {
            "wanted": seen.replicas_wanted,
            "max": seen.replica_max,
            "items": msgspec.to_builtins(seen.replicas),
        },
        "capabilities": msgspec.to_builtins(can),
        "caches": caches if has_window else _without_windows(caches),
        "load_constraints": {
            "overrides": about["overrides"],
            "replica_max": seen.replica_max,
            "target_inflight": seen.target_inflight,
            "idle_ttl_s": seen.idle_ttl_s,
        },
        "overrides": msgspec.to_builtins(seen.overrides),
        "memory": {"estimate": _memory(seen.estimate), "measured": seen.measured},
        "enabled": about["enabled"],
        "in_library": about["in_library"],
        "autoload": seen.autoload,
        "loads_on_request": seen.loads_on_request,
        "loads": seen.loads,
        "load_s": seen.load_s,
        "last_used": seen.last_used,
        "definition": about["definition"],
        "log": list(log),
    }


def _without_windows(caches: Json) -> Json:
    return {name: cache | {"window": None} for name, cache in caches.items()}


def _queue(seen: ModelStatus) -> Json:
    return {
        "waiting": seen.waiting,
        "waiting_tokens": seen.waiting_tokens,
        "running": seen.running,
        "slots": seen.slots,
        "longest_wait_s": seen.wait_s,
        "service_s": seen.service_s,
    }


def _memory(memory: MemoryEstimate | None) -> Json | None:
    return None if memory is None else {**msgspec.to_builtins(memory), "total": memory.total}


def memory(machine: MachineMemory, pool: PoolSnapshot) -> Json:
    """Bytes everywhere. `measured` is what a model's last load really took."""
    return {
        "gpus": [msgspec.to_builtins(gpu) for gpu in machine.gpus],
        "ram": {"total": machine.ram_total, "free": machine.ram_free, "used_here": machine.ram_used_here},
        "limits": [msgspec.to_builtins(device) for device in pool.devices],
        "models": [
            {
                "id": seen.name,
                "state": seen.state,
                "replicas": sum(one.state in ("ready", "draining") for one in seen.replicas),
                "estimate": _memory(seen.estimate),
                "measured": seen.measured,
            }
            for seen in pool.models.values()
        ],
    }


def estimate(name: str, taken: MemoryEstimate, machine: MachineMemory, devices: Sequence[DeviceSnapshot]) -> Json:
    """`free` is what one more replica can have now on the device of the estimate: what is free there, within the limit
    of the scheduler. Idle models may make room. `limit` is the most that all models may take; None: what there is."""
    on_gpu = taken.device != "cpu" and bool(machine.gpus)
    free = sum(gpu.free for gpu in machine.gpus) if on_gpu else machine.ram_free
    total = sum(gpu.total for gpu in machine.gpus) if on_gpu else machine.ram_total
    limited = next((seen for seen in devices if seen.device == ("gpu" if on_gpu else "cpu")), None)
    limit = limited.limit if limited is not None else None
    if limited is not None and limit is not None:
        free, total = max(0, min(free, limit - limited.taken)), min(total, limit)
    return {
        "id": name,
        "estimate": _memory(taken),
        "free": free,
        "limit": limit,
        "fits": taken.total <= free,
        "possible": taken.total <= total,
    }


# --- requests ---------------------------------------------------------------------------------------------------------


def live(seen: RequestSnapshot, running: RunningRequest | None = None) -> Json:
    """`progress` is null for a request of another gateway process."""
    progress = None if running is None else msgspec.to_builtins(running)
    return {**msgspec.to_builtins(seen), "id": f"req_{seen.trace}", "progress": progress}


def finished(record: RequestRecord) -> Json:
    usage, timings = record.usage, record.timings
    decode = timings.decode if usage.output > 1 else None
    return {
        **msgspec.to_builtins(record),
        "id": f"req_{record.trace}",
        "state": "failed" if record.failed else "finished",
        "tokens_per_s": (usage.output - 1) / decode if decode else None,
    }


def captured(found: CapturedRequest | None) -> Json | None:
    return None if found is None else msgspec.to_builtins(found)


# --- the last hour ----------------------------------------------------------------------------------------------------


def history(slices: Iterable[HistoryInterval]) -> Json:
    return {"slice_s": INTERVAL_S, "slices": [_slice(one) for one in slices]}


def _slice(one: HistoryInterval) -> Json:
    return {
        "at": one.at,
        "requests": one.requests,
        "failures": one.failures,
        "prompt_tokens": one.prompt,
        "cached_tokens": one.cached,
        "output_tokens": one.output,
        "reuse": one.cached / one.prompt if one.prompt else None,
        "waiting": one.waiting,
        "first_token_s": _spread(one.first_token_s),
        "inter_token_s": _spread(one.inter_token_s),
        "tokens_per_s": _spread(one.tokens_per_s),
    }


def _spread(samples: list[float]) -> Json | None:
    if not samples:
        return None
    top = quantiles(samples, n=20)[-1] if len(samples) > 1 else samples[0]
    return {"p50": median(samples), "p95": min(top, max(samples))}


# --- caches and routes ------------------------------------------------------------------------------------------------


def caches(name: str, windows: Mapping[str, Any], engines: Iterable[Engine], has_window: bool = True) -> list[Json]:
    """One entry a cache and replica; a model that is not up has its caches' sizes alone."""
    up = list(engines)
    stats: list[tuple[int | None, Mapping[str, CacheStats]]] = [(i, one.stats().caches) for i, one in enumerate(up)]
    return [
        {
            "model": name,
            "cache": cache,
            "replica": replica,
            "window": info.window if has_window else None,
            "parallel": info.parallel,
            **_reuse(caches.get(cache)),
        }
        for replica, caches in stats or [(None, {})]
        for cache, info in windows.items()
    ]


def _reuse(stats: CacheStats | None) -> Json:
    if stats is None:
        return {"sequences": [], "reuse": None}
    read = stats.reused_tokens + stats.evaluated_tokens
    return {**msgspec.to_builtins(stats), "reuse": stats.reused_tokens / read if read else None}


def route(name: str, endpoint: str, target: Target, backend: str) -> Json:
    return {"asked": name, "endpoint": endpoint, "backend": backend, **msgspec.to_builtins(target)}
