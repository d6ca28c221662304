from __future__ import annotations

import pytest

from modelyard.core.events import collect_reply
from modelyard.protocols import pool_responses
from tests.protocols.golden import check_golden
from tests.protocols.pool_responses.helpers import CASES, REQUEST


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"failed"}))
def test_the_reply_matches_its_golden_file(name: str) -> None:
    check_golden("pool_responses", f"{name}.json", pool_responses.write_reply([collect_reply(CASES[name])], REQUEST))
