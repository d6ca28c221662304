"""Prometheus text as a dict, so that a test names the one value it means."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

Values = dict[tuple[str, ...], float]


def values(text: bytes, sample: str) -> Values:
    """Values of one sample name by its label values, in the order of the label names."""
    return {
        tuple(found.labels[name] for name in sorted(found.labels)): found.value
        for family in text_string_to_metric_families(text.decode())
        for found in family.samples
        if found.name == sample
    }
