"""Parses Prometheus text, so that a test can name one value."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def sample_values(text: bytes, sample: str) -> dict[tuple[str, ...], float]:
    """Values of one sample name by its label values, in the order of the label names."""
    return {
        tuple(found.labels[name] for name in sorted(found.labels)): found.value
        for family in text_string_to_metric_families(text.decode())
        for found in family.samples
        if found.name == sample
    }
