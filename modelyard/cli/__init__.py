"""The `modelyard` command: one file per command group."""
