"""Routing: which model and which of its caches a request goes to. Pure."""
