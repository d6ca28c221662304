"""Lists of OpenAI's API: pages of objects, and the `metadata` that clients attach to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from modelyard.core.errors import InvalidRequest
from modelyard.protocols.common.json import JsonObject, encode

_MAX_PAIRS = 16
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = dict[MetadataKey, MetadataValue]


class PageQuery(Struct, frozen=True):
    """Which page of a list: `limit` objects after the object `after`."""

    after: str
    limit: int
    newest_first: bool


def read_page_query(query: Mapping[str, str], *, default: int = 20, most: int = 100, order: str = "desc") -> PageQuery:
    limit, order = query.get("limit", ""), query.get("order", order)
    if limit and not (limit.isdecimal() and 1 <= int(limit[:9]) <= most):
        raise InvalidRequest(f"limit must be a number from 1 to {most}, not {limit[:40]!r}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be 'asc' or 'desc', not {order[:40]!r}", param="order")
    return PageQuery(query.get("after", ""), int(limit or default), order == "desc")


def write_page(items: Sequence[JsonObject | Raw], ids: Sequence[str], has_more: bool) -> bytes:
    """`ids` are those of the items. The SDKs ask for the page after the last one."""
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return encode({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more})


def check_metadata(metadata: Metadata | None) -> Metadata:
    if metadata is not None and len(metadata) > _MAX_PAIRS:
        raise InvalidRequest(f"metadata has {len(metadata)} pairs; the most are {_MAX_PAIRS}", param="metadata")
    return metadata or {}


def field_of(body: bytes, name: str) -> Raw | None:
    """One field of a JSON object that this server has written."""
    found = msgspec.json.decode(body, type=dict[str, Raw]).get(name)
    return None if found is None else Raw(bytes(found))
