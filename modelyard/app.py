"""The ASGI app of a server: `python -m uvicorn modelyard.app:create_app --factory`."""

from modelyard.server.serve import create_app

__all__ = ["create_app"]
