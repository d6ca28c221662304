"""MCP beyond tools: logins, resources and prompts by command, and two small servers of our own (`fetch`, `search`)."""
