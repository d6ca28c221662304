"""The composition root: builds the parts from a configuration, connects them and runs the server."""
