"""The pool dialect of POST /v1/responses: a text, images or turns in; a text and its metrics out. Server role only.

It shares its path with OpenAI's Responses: `openai_responses` hands over the bodies that are in this dialect.
"""

from modelyard.protocols.pool_responses.errors import write_error
from modelyard.protocols.pool_responses.reply import write_reply
from modelyard.protocols.pool_responses.request import DIALECT, read_request
from modelyard.protocols.pool_responses.stream import writer

NAME = "pool_responses"

__all__ = ["DIALECT", "NAME", "read_request", "write_error", "write_reply", "writer"]
