from __future__ import annotations

import pytest
from pydantic import ValidationError

from modelyard.scheduler.memory_planner import MemoryLimits
from modelyard.scheduler.settings import SchedulerOptions, SchedulerSettings


def test_the_queue_is_limited_by_default() -> None:
    settings = SchedulerSettings()
    assert (settings.endpoint, settings.timeout_ms, settings.max_waiting) == ("", 30_000, 1024)
    assert settings.max_waiting_tokens is None
    assert settings.options() == SchedulerOptions(max_wait_s=600.0)
    assert settings.memory_limits() == MemoryLimits()


@pytest.mark.parametrize(
    "field",
    ["timeout_ms", "max_waiting", "max_waiting_tokens", "max_wait_s", "memory_limit", "idle_ttl_s", "load_timeout_s"],
)
def test_negative_values_are_refused(field: str) -> None:
    with pytest.raises(ValidationError):
        SchedulerSettings.model_validate({field: -1})


@pytest.mark.parametrize(
    ("written", "limits"),
    [
        ({"memory_limit": "2GiB"}, MemoryLimits(ram=2 * 2**30)),
        ({"memory_limit": 1000}, MemoryLimits(ram=1000)),
        ({"gpu_memory_limit": "1GiB"}, MemoryLimits(each_gpu=2**30)),
        ({"gpu_memory_limit": {"GPU-1": "1GiB", "GPU-2": 5}}, MemoryLimits(gpus={"GPU-1": 2**30, "GPU-2": 5})),
    ],
)
def test_sizes_may_have_units(written: dict[str, object], limits: MemoryLimits) -> None:
    assert SchedulerSettings.model_validate(written).memory_limits() == limits
