"""OpenAI Responses, both roles: items in and out, a numbered event stream, stored conversations."""

from modelyard.protocols.openai_responses.dialects import read_request, write_error, write_reply, writer
from modelyard.protocols.openai_responses.errors import read_error
from modelyard.protocols.openai_responses.outgoing import write_request
from modelyard.protocols.openai_responses.reader import read_reply, reader
from modelyard.protocols.openai_responses.stored import (
    StoredResponse,
    decode_stored,
    encode_stored,
    prepend_stored,
    write_deleted,
    write_input_items,
    write_input_tokens,
)

NAME = "openai_responses"
PATHS: tuple[str, ...] = ("/v1/responses", "/responses")

__all__ = [
    "NAME",
    "PATHS",
    "StoredResponse",
    "prepend_stored",
    "read_error",
    "read_reply",
    "read_request",
    "reader",
    "decode_stored",
    "encode_stored",
    "write_deleted",
    "write_error",
    "write_input_items",
    "write_input_tokens",
    "write_reply",
    "write_request",
    "writer",
]
