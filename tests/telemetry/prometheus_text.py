"""Parses Prometheus text, so that a test can name one value."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def sample_values(text: bytes, sample: str) -> dict[tuple[str, ...], float]:
    """Values of one sample name by its label values, in the order of the label names. `modelyard_` may be left out."""
    samples = [found for family in text_string_to_metric_families(text.decode()) for found in family.samples]
    name = sample if any(found.name == sample for found in samples) else f"modelyard_{sample}"
    return {
        tuple(found.labels[label] for label in sorted(found.labels)): found.value
        for found in samples
        if found.name == name
    }
