"""Plug-ins for Modelyard from another package: an engine, a client protocol and an output format."""
