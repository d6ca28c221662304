from __future__ import annotations

import pytest

from modelyard.core.output_format import SwitchRegion
from modelyard.scanner.formats import load, names


@pytest.mark.parametrize("name", names())
def test_a_format_is_named_after_its_file(name: str) -> None:
    assert load(name).name == name


@pytest.mark.parametrize("name", names())
def test_every_region_that_a_marker_leads_to_exists(name: str) -> None:
    form = load(name)
    led_to = {act.region for r in form.regions.values() for act in r.marks.values() if isinstance(act, SwitchRegion)}
    assert led_to | {form.start} <= set(form.regions)


@pytest.mark.parametrize("name", names())
def test_calls_are_honoured_in_every_region(name: str) -> None:
    regions = load(name).regions.values()
    readers = [{mark for mark, act in region.marks.items() if not isinstance(act, SwitchRegion)} for region in regions]
    assert all(found == readers[0] for found in readers)
