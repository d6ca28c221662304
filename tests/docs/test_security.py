"""docs/security.md names tests, settings and pages that exist."""

from __future__ import annotations

import re

import pytest

from modelyard.config.settings import Config, type_at
from tests.docs.pages import DOCS

PAGE = (DOCS / "security.md").read_text()
ROOT = DOCS.parent


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[\w/.]+)`", PAGE))))
def test_every_named_test_exists(path: str) -> None:
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("section", ["http", "keys", "log", "store", "images", "mcp", "workers", "routes"])
def test_every_named_setting_exists(section: str) -> None:
    names = set(re.findall(rf"`{section}\.(\w+)", PAGE))
    assert names
    is_list = section in ("keys", "routes")
    kind = type_at((section, 0)) if is_list else type_at((section,))
    assert section in Config.model_fields
    assert names <= kind.model_fields.keys()


def test_every_link_leads_to_a_page_or_heading() -> None:
    headings = {
        re.sub(r"[^\w -]", "", line[3:].lower()).replace(" ", "-") for line in PAGE.splitlines() if line[:3] == "## "
    }
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        page, _, heading = target.partition("#")
        assert (DOCS / page).is_file() if page else heading in headings
