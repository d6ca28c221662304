"""`modelyard launch`: runs a coding agent on a local model, without changing the agent's own settings."""
