"""How long the strings and lists of a request may be: one table for every protocol.

The structs of the request bodies use these types for their fields, so a body over a limit is refused while it is
decoded, before anything works with it. The error names the field and the limit. `Text` and free JSON (schemas,
metadata, template arguments) are what a client has to say: the size, depth and number of values of the body limit them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from msgspec import Meta

from modelyard.core.errors import InvalidRequest

MAX_NAME = 1024
MAX_GRAMMAR = 1 << 15  # characters of a client's own grammar or regular expression
MAX_SCHEMA = 1 << 18  # characters of a JSON schema, and of a grammar made from one
MAX_PATTERN = 2048  # characters of a `pattern` in a schema
MAX_STOP_CHARS = 8192  # characters of all stop strings together
MAX_INPUTS = 2048  # texts of one request for embeddings
MAX_WARNINGS = 20  # warnings that a request may cause; the log has a line for each

# --- strings ---------------------------------------------------------------------------------------------------------

Word = Annotated[str, Meta(max_length=256)]  # a role, type, mode or effort
Name = Annotated[str, Meta(max_length=MAX_NAME)]  # of a model, tool, adapter, user or session
Id = Annotated[str, Meta(max_length=1 << 16)]  # of a call or response; some providers put their state into it
Text = Annotated[str, Meta(max_length=1 << 30)]  # what the model reads, and data that is only passed on
Grammar = Annotated[str, Meta(max_length=MAX_GRAMMAR)]
StopString = Annotated[str, Meta(max_length=1024)]

# --- lists -----------------------------------------------------------------------------------------------------------

StopStrings = Annotated[list[StopString], Meta(max_length=128)]
Samplers = Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=32)]
SequenceBreakers = Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=32)]
LogitBias = Annotated[dict[Annotated[str, Meta(max_length=64)], float], Meta(max_length=1 << 14)]
LogitBiasPairs = Annotated[list[Annotated[list[Any], Meta(max_length=2)]], Meta(max_length=1 << 14)]
Words = Annotated[list[Word], Meta(max_length=64)]
TokenIds = Annotated[list[int], Meta(max_length=1 << 21)]
Prompts = Annotated[list[Text | int | TokenIds], Meta(max_length=1 << 21)]  # or the token ids of one
MixedPrompt = Annotated[list[Text | int], Meta(max_length=1 << 21)]  # texts among the token ids of one prompt
Choices = Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(max_length=1024)]  # texts that an output may be
JsonObject = Annotated[dict[str, Any], Meta(max_length=100_000)]
LlamaPrompt = Text | MixedPrompt | JsonObject  # llama-server's: also {"prompt_string", "multimodal_data"}
LlamaPrompts = Text | Annotated[list[Text | MixedPrompt | JsonObject | int], Meta(max_length=1 << 21)] | JsonObject
AdapterScales = Annotated[list[JsonObject], Meta(max_length=64)]
ScoredTexts = Annotated[list[Text], Meta(max_length=10_000)]
Documents = Annotated[tuple[JsonObject, ...], Meta(max_length=10_000)]
RankedDocuments = Annotated[list[Text | JsonObject], Meta(max_length=10_000)]
ProjectFiles = Annotated[list[JsonObject], Meta(max_length=10_000)]

Messages = Meta(max_length=100_000)  # messages of a conversation, or items of an input
Parts = Meta(max_length=100_000)  # of one message
Tools = Meta(max_length=10_000)
Calls = Meta(max_length=10_000)  # in one message


def too_long(field: str, limit: int, unit: str = "characters") -> InvalidRequest:
    code = "string_above_max_length" if unit == "characters" else "array_above_max_length"  # OpenAI's codes
    return InvalidRequest(f"{field} is too long: at most {limit} {unit}; shorten it", param=field, code=code)


def check_length(field: str, text: str, limit: int) -> str:
    if len(text) > limit:
        raise too_long(field, limit)
    return text


def check_stop_strings(field: str, stop: Collection[str]) -> None:
    if sum(map(len, stop)) > MAX_STOP_CHARS:
        raise too_long(field, MAX_STOP_CHARS, "characters")
