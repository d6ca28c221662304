from __future__ import annotations

import pytest
from pydantic import ValidationError

from modelyard.store import StoreSettings


def test_memory_is_the_default() -> None:
    assert StoreSettings().backend == "memory"


def test_sqlite_needs_a_file() -> None:
    with pytest.raises(ValidationError, match='backend "sqlite" needs path'):
        StoreSettings.model_validate({"backend": "sqlite"})
    assert str(StoreSettings.model_validate({"backend": "sqlite", "path": "x.db"}).path) == "x.db"
