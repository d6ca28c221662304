from __future__ import annotations

import pytest
from pydantic import ValidationError

from modelyard.prompt.settings import ImageSettings


def test_nothing_is_allowed_by_default() -> None:
    assert (ImageSettings().allow, ImageSettings().allow_private) == ([], False)


def test_hosts_and_folders_are_parsed() -> None:
    allow = ["*.example.com", "localhost", "file:///pictures/"]
    assert ImageSettings(allow=allow).allow == allow


@pytest.mark.parametrize("entry", ["https://example.com", "file://pictures/", "file:///pictures", "a/b", ""])
def test_invalid_entries_are_refused_with_an_explanation(entry: str) -> None:
    with pytest.raises(ValidationError, match=r"host glob|written file:///"):
        ImageSettings(allow=[entry])
