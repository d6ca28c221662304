"""docs/metrics.md and the Grafana dashboard: they name every metric, and only metrics that exist."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from modelyard.telemetry.metrics import ALSO_WITHOUT_PREFIX, CACHE_HIT_RATIO, METRICS, MetricSpec
from tests.docs.pages import DOCS

FILE = DOCS / "metrics.md"
DASHBOARD = DOCS.parent / "deploy" / "grafana" / "modelyard.json"
SPECS = (*METRICS.values(), CACHE_HIT_RATIO)
SAMPLES = {
    f"{spec.exposed}{suffix}"
    for spec in SPECS
    for suffix in (("_bucket", "_sum", "_count") if spec.kind == "histogram" else ("",))
}


def table() -> Iterator[str]:
    yield from ("| metric | type | labels | meaning |", "|---|---|---|---|")
    for spec in sorted(SPECS, key=lambda spec: spec.name):
        mark = " *" if spec.name in ALSO_WITHOUT_PREFIX else ""
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        yield f"| `{spec.exposed}`{mark} | {spec.kind} | {labels} | {spec.help} |"


def test_the_page_lists_every_metric() -> None:
    """MODELYARD_GOLDEN=write updates the page."""
    page = FILE.read_text()
    begin, end = "<!-- metrics: begin -->\n", "<!-- metrics: end -->"
    head, rest = page.split(begin)
    old, tail = rest.split(end)
    new = "\n".join(table()) + "\n"
    if os.environ.get("MODELYARD_GOLDEN") == "write":
        FILE.write_text(f"{head}{begin}{new}{end}{tail}")
    assert old == new, "run the tests with MODELYARD_GOLDEN=write to update the table"


def test_the_queries_of_the_page_name_metrics_that_exist() -> None:
    found = re.findall(r"\| `([^`]+)` \|$", FILE.read_text().split("Useful queries:")[1], re.MULTILINE)
    assert len(found) >= 5
    for query in found:
        check_query(query)


def queries(panel: dict[str, Any]) -> Iterator[str]:
    yield from (target["expr"] for target in panel.get("targets", ()))
    for inner in panel.get("panels", ()):
        yield from queries(inner)


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def test_the_dashboard_uses_metrics_and_labels_that_exist() -> None:
    found = [query for panel in dashboard()["panels"] for query in queries(panel)]
    found += [each["query"]["query"] for each in dashboard()["templating"]["list"] if each["type"] == "query"]
    assert len(found) > 15
    for query in found:
        check_query(query)


def check_query(query: str) -> None:
    names = set(re.findall(r"\bmodelyard_\w+", query))
    assert names, query
    assert names <= SAMPLES, query
    specs = [spec for spec in SPECS if any(_base(name) == spec.exposed for name in names)]
    known = {label for spec in specs for label in spec.labels} | {"le", "instance", "job"}
    used = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in re.split(r",\s*", group)}
    used |= set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", query))
    assert used <= known, query


def _base(name: str) -> str:
    return next((name.removesuffix(end) for end in ("_bucket", "_sum", "_count") if name.endswith(end)), name)


def test_a_wrong_name_or_label_in_a_query_is_noticed() -> None:
    for query in ("modelyard_no_such_total", "sum by (colour) (modelyard_queue_waiting)"):
        with pytest.raises(AssertionError):
            check_query(query)


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    taken = set[tuple[int, int]]()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))


def test_every_metric_has_a_sentence_and_a_base_unit() -> None:
    for spec in SPECS:
        assert spec.help[0].isupper(), spec.name
        assert not spec.help.endswith("."), spec.name
        assert not re.search(r"_(ms|milliseconds|mb|mib|kb)(_|$)", spec.name)
        assert isinstance(spec, MetricSpec)
