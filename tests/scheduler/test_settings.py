from __future__ import annotations

import pytest
from pydantic import ValidationError

from modelyard.scheduler.settings import SchedulerSettings


def test_the_queue_is_bounded_by_default() -> None:
    settings = SchedulerSettings()
    assert (settings.endpoint, settings.timeout_ms, settings.max_waiting) == ("", 30_000, 1024)
    assert settings.max_waiting_tokens is None


@pytest.mark.parametrize("field", ["timeout_ms", "max_waiting", "max_waiting_tokens"])
def test_negative_bounds_are_refused(field: str) -> None:
    with pytest.raises(ValidationError):
        SchedulerSettings.model_validate({field: -1})
