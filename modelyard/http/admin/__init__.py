"""The admin API: models, memory, requests and caches of the pool, seen and ordered; for people, scripts and pages."""
