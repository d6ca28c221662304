"""Text that UTF-8 cannot spell, made into text that it can."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """Lone surrogates, which JSON can spell and UTF-8 cannot, become U+FFFD; pairs become their character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
