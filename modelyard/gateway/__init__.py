"""The life of a request: read → resolve → render → lease → generate → scan → events. Start with `gateway.py`."""

from modelyard.gateway.choices import MultiChoiceStream
from modelyard.gateway.dedup import SharedReader
from modelyard.gateway.gateway import ChoiceStream, Gateway
from modelyard.gateway.model import Model
from modelyard.gateway.prepared_request import PreparedRequest

EventSource = ChoiceStream | MultiChoiceStream | SharedReader  # what `Gateway.start` returns; all read alike

__all__ = ["ChoiceStream", "EventSource", "Gateway", "Model", "MultiChoiceStream", "PreparedRequest", "SharedReader"]
