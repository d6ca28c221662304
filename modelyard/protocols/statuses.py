"""What an upstream's HTTP status means where its body says no more."""

from __future__ import annotations

from collections.abc import Mapping

from modelyard.core import errors
from modelyard.core.errors import ModelyardError

BY_STATUS: Mapping[int, type[ModelyardError]] = {
    400: errors.InvalidRequest,
    401: errors.Unauthenticated,
    402: errors.Forbidden,
    403: errors.Forbidden,
    404: errors.NotFound,
    408: errors.Timeout,
    409: errors.Conflict,
    413: errors.TooLarge,
    422: errors.InvalidRequest,
    501: errors.Unimplemented,
    504: errors.Timeout,
}
