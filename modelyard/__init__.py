"""Modelyard: one port, every client, every engine."""

__version__ = "0.2.0"
