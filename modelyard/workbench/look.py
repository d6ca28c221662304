"""What the workbench looks like: its colours here, everything else in look.css."""

from __future__ import annotations

from pathlib import Path

STATES = {
    "ready": "positive",
    "loading": "warning",
    "draining": "accent",
    "failed": "negative",
    "stopped": "grey-6",
    "running": "positive",
    "waiting": "warning",
    "finished": "grey-6",
}

SERIES = ("#4f7cff", "#14b8a6", "#f59e0b", "#ec4899", "#8b5cf6", "#84cc16", "#06b6d4", "#ef4444")

BRAND = {
    "primary": "#3f6df6",
    "secondary": "#0f766e",
    "accent": "#8b5cf6",
    "positive": "#16a34a",
    "negative": "#dc2626",
    "warning": "#d97706",
    "info": "#0284c7",
    "dark": "#151a21",
    "dark_page": "#0d1117",
}

CSS = Path(__file__).with_name("look.css")
