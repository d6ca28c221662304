"""All errors as one tree. A class has a kind, code and retry hint; it knows nothing of HTTP.

    ModelyardError
    ├── InvalidRequest          the request cannot be served as it is; the client must change it
    │   ├── ContextOverflow     the prompt alone fills the window
    │   ├── OutputOverflow      prompt + max_tokens do not fit and the cache is strict
    │   └── Unsupported         the model or engine cannot do this (modality, constraint, several turns)
    ├── Unauthenticated         no API key, or a wrong one
    ├── Forbidden               a valid key without permission, a foreign Host, a remote model without consent
    ├── NotFound                no such model, response or path
    ├── Conflict                not possible in the current state (a model that is not loaded)
    ├── TooLarge                body or headers over their limit
    ├── RateLimited             too much in too short a time; with Retry-After
    │   ├── KeyLimited          by us, not by an upstream: no other model helps
    │   └── QuotaExceeded       the key's budget is used; with Retry-After if it resets
    ├── Overloaded              the queue is full; with Retry-After and the queue position
    ├── Unavailable             engine, worker or scheduler lost; a retry may succeed
    ├── Timeout                 a deadline passed
    ├── Unimplemented           the engine has no such function
    ├── Cancelled               an administrator cancelled it, or the client disconnected; not to be retried
    └── Internal                a bug; the details are in the log under `id`
        └── Incomplete          an engine's stream violated the event contract

The protocol decides how an error is written (`write_error`). Foreign errors are mapped where they enter; anything
unknown becomes `Internal`.
"""

from __future__ import annotations

from typing import ClassVar, Literal
from uuid import uuid4

Kind = Literal[
    "invalid",
    "unauthenticated",
    "forbidden",
    "not_found",
    "conflict",
    "too_large",
    "rate_limited",
    "overloaded",
    "unavailable",
    "timeout",
    "unimplemented",
    "cancelled",
    "internal",
]


BY_ADMINISTRATOR = "an administrator cancelled this request"  # the message of a Cancelled
ENGINE_DIED = "engine_died"  # code of an Unavailable: the engine died with this request on it, which may be the cause


class ModelyardError(Exception):
    """`code` is for programs, `message` for people, `param` names the field at fault, `retry_after` is in seconds."""

    kind: ClassVar[Kind] = "internal"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.retry_after = retry_after

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), self.message))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, code={self.code!r})"


def with_message(error: ModelyardError, message: str) -> ModelyardError:
    """The same error with other words."""
    changed = type(error).__new__(type(error))
    changed.__dict__.update(error.__dict__)
    changed.message, changed.args = message, (message,)
    return changed


class InvalidRequest(ModelyardError):
    kind = "invalid"


class ContextOverflow(InvalidRequest):
    default_code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, window: int) -> None:
        super().__init__(f"the prompt has {prompt_tokens} tokens and the window only {window}")
        self.prompt_tokens, self.window = prompt_tokens, window


class OutputOverflow(InvalidRequest):
    default_code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_tokens: int, window: int) -> None:
        super().__init__(
            f"{prompt_tokens} prompt tokens and {max_tokens} output tokens do not fit the window of {window}"
        )
        self.prompt_tokens, self.max_tokens, self.window = prompt_tokens, max_tokens, window


class Unsupported(InvalidRequest):
    default_code = "unsupported"


class Unauthenticated(ModelyardError):
    kind = "unauthenticated"
    default_code = "invalid_api_key"


class Forbidden(ModelyardError):
    kind = "forbidden"
    default_code = "forbidden"


class NotFound(ModelyardError):
    kind = "not_found"
    default_code = "not_found"


class Conflict(ModelyardError):
    kind = "conflict"
    default_code = "conflict"


class TooLarge(ModelyardError):
    kind = "too_large"
    default_code = "request_too_large"


class RateLimited(ModelyardError):
    kind = "rate_limited"
    default_code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: float | None, code: str | None = None) -> None:
        super().__init__(message, retry_after=retry_after, code=code)


class KeyLimited(RateLimited):
    """By the limits of the client's key, not by an upstream: no other model helps."""


class QuotaExceeded(RateLimited):
    """The code is OpenAI's: its clients know that to try again at once is in vain."""

    default_code = "insufficient_quota"

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message, retry_after=retry_after)


class Overloaded(ModelyardError):
    kind = "overloaded"
    default_code = "server_is_overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0, position: int | None = None) -> None:
        super().__init__(message, retry_after=retry_after)
        self.position = position


class Unavailable(ModelyardError):
    kind = "unavailable"
    default_code = "engine_unavailable"

    def __init__(self, message: str, *, retry_after: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, retry_after=retry_after, code=code)


class Timeout(ModelyardError):
    kind = "timeout"
    default_code = "timeout"


class Unimplemented(ModelyardError):
    kind = "unimplemented"
    default_code = "not_implemented"


class Cancelled(ModelyardError):
    kind = "cancelled"
    default_code = "cancelled"


class Internal(ModelyardError):
    kind = "internal"
    default_code = "internal_error"

    def __init__(self, message: str = "internal error", *, id: str | None = None) -> None:
        self.id = id or uuid4().hex[:12]
        super().__init__(f"{message} (id {self.id})" if id is None else message)


class Incomplete(Internal):
    default_code = "incomplete_stream"
