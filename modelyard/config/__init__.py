"""Configuration: settings classes, sources (files, environment, command line), checks and error messages."""
