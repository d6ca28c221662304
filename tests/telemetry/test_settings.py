from __future__ import annotations

import pytest
from pydantic import ValidationError

from modelyard.telemetry.settings import LogSettings


@pytest.mark.parametrize(("written", "level"), [("INFO", "info"), ("warn", "warning"), ("Error", "error")])
def test_levels_are_understood_in_any_case(written: str, level: str) -> None:
    assert LogSettings.model_validate({"level": written}).level == level


@pytest.mark.parametrize("level", ["loud", 3, None])
def test_an_unknown_level_is_refused(level: object) -> None:
    with pytest.raises(ValidationError):
        LogSettings.model_validate({"level": level})
