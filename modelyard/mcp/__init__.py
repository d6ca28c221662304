"""MCP: connections to servers of the Model Context Protocol, whose tools the gateway calls for a model."""
