"""The life of a request: read → resolve → render → lease → generate → scan → events. Start with `gateway.py`."""
