"""The life of a request: resolve → render → lease → generate → scan → events. Read `gateway.py` first."""

from modelyard.gateway.answer import Answer
from modelyard.gateway.gateway import Gateway
from modelyard.gateway.job import Job
from modelyard.gateway.joined import Listener
from modelyard.gateway.model import Model

__all__ = ["Answer", "Gateway", "Job", "Listener", "Model"]
