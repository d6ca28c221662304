"""MCP beyond tools: logging in at servers, reading their resources and prompts by command, and two small servers of
our own (`fetch`, `search`)."""
