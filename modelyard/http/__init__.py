"""The edge: the only package that knows HTTP, Starlette and FastAPI."""
