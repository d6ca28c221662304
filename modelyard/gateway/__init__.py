"""The life of a request: resolve → render → lease → generate → scan → events. Read `gateway.py` first."""

from modelyard.gateway.answer import ChoiceStream
from modelyard.gateway.dedup import SharedReader
from modelyard.gateway.gateway import Gateway
from modelyard.gateway.model import Model
from modelyard.gateway.prepared_request import PreparedRequest

__all__ = ["ChoiceStream", "Gateway", "PreparedRequest", "SharedReader", "Model"]
