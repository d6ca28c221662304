"""Shared by engines that forward to another server: HTTP client, retries, error mapping, jobs."""
