"""Which model and which of its caches a request goes to; pure."""
