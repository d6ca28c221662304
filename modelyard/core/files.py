"""Uploaded files, as every protocol shows them."""

from __future__ import annotations

from msgspec import Struct


class FileRecord(Struct, frozen=True):
    """`created` and `expires` are Unix times. `mime_type` is what the client said, or empty."""

    id: str
    bytes: int
    created: int
    expires: int
    filename: str
    purpose: str
    mime_type: str = ""
