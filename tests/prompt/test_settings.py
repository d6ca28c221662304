from __future__ import annotations

import pytest
from pydantic import ValidationError

from modelyard.prompt.settings import ImageSettings


def test_nothing_is_allowed_by_default() -> None:
    assert (ImageSettings().allow, ImageSettings().allow_private) == ([], False)


def test_hosts_and_folders_are_understood() -> None:
    allow = ["*.example.com", "localhost", "file:///pictures/"]
    assert ImageSettings(allow=allow).allow == allow


@pytest.mark.parametrize("entry", ["https://example.com", "file://pictures/", "file:///pictures", "a/b", ""])
def test_anything_else_is_refused_with_how_to_write_it(entry: str) -> None:
    with pytest.raises(ValidationError, match=r"host glob|written file:///"):
        ImageSettings(allow=[entry])
