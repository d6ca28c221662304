"""What must not leave the server, masked in errors, log lines, captured texts and the admin API.

Secrets are masked by value, wherever they appear: an upstream may echo the key that it was sent. Who reads a secret
adds it here: the configuration its keys, headers and credentials, an engine those of its upstream. Server paths are
masked in errors for clients; the log and the admin API keep them.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec

MASK = "***"
_MIN_SECRET = 8  # characters: a shorter value occurs by chance
_SCHEMES = ("bearer ", "basic ", "token ", "apikey ")  # of an Authorization header
_SECRET_NAME = re.compile(
    r"(^|[_-])(api)?(key|token|secret|password|auth|authorization|cookie|credential|signature)($|[_-])", re.IGNORECASE
)
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w.+/=~-]{20,}")
_KEY = re.compile(r"\bmy-[\w-]{43}(?![\w-])|\b(?:sk|gsk|hf|xai|AIza)[-_]?[\w-]{20,}")  # ours, and well-known ones
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@'\"]+@")
_BESIDE_FOLDERS = frozenset({"v1"})  # first parts of our own paths
_PATH_END = r"""[^\s'"`,;:()<>\[\]{}|]*"""


class SecretMask:
    """Masks every value that was added, also as part of JSON or of a URL."""

    def __init__(self) -> None:
        self._values: set[str] = set()
        self._texts: re.Pattern[str] | None = None
        self._bytes: re.Pattern[bytes] | None = None

    def add(self, values: Iterable[str]) -> None:
        new = {form for value in values for form in _forms(value)} - self._values
        if not new:
            return
        self._values |= new
        longest_first = sorted(self._values, key=len, reverse=True)
        self._texts = re.compile("|".join(map(re.escape, longest_first)))
        self._bytes = re.compile(b"|".join(re.escape(value.encode("utf-8", "replace")) for value in longest_first))

    def values(self, value: Any) -> Any:
        """Lists and dictionaries with their texts masked; the keys of dictionaries stay."""
        if self._texts is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self.values(item) for key, item in value.items()}
        return [self.values(item) for item in value] if isinstance(value, list | tuple) else value

    def text(self, text: str) -> str:
        return text if self._texts is None else self._texts.sub(MASK, text)

    def bytes(self, data: bytes) -> bytes:
        return data if self._bytes is None else self._bytes.sub(MASK.encode(), data)


def _forms(value: str) -> Iterator[str]:
    """The value as it may be spelled elsewhere."""
    value = value.strip()
    for scheme in _SCHEMES:
        if value.lower().startswith(scheme):
            yield from _forms(value[len(scheme) :])
    if len(value) >= _MIN_SECRET:
        yield from {value, quote(value, safe=""), msgspec.json.encode(value)[1:-1].decode()}


_secrets = SecretMask()
add_secrets = _secrets.add
mask_secrets = _secrets.text
mask_secret_bytes = _secrets.bytes
mask_secret_values = _secrets.values


def mask_keys(path: str) -> str:
    """Also what only looks like a key: created keys are known by their hashes alone, and others are not ours."""
    return _KEY.sub(MASK, mask_secrets(path))


def is_secret_name(name: str) -> bool:
    """Of a setting, a variable, an option or a header."""
    return _SECRET_NAME.search(name) is not None


def header_secrets(headers: Mapping[str, str]) -> Iterator[str]:
    """By their names, and values that look like keys."""
    return (value for name, value in headers.items() if is_secret_name(name) or _RANDOM.fullmatch(value))


def url_secrets(url: str) -> Iterator[str]:
    """The credentials in a URL: the password, and both as an HTTP client sends them."""
    try:
        user, password = urlsplit(url).username or "", urlsplit(url).password
    except ValueError:  # not a URL
        return
    if password is not None:
        yield unquote(password)
        yield base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    elif user:
        yield unquote(user)  # a token


def without_credentials(url: str) -> str:
    return _CREDENTIALS.sub(f"{MASK}@", url)


# --- server paths -----------------------------------------------------------------------------------------------------


class PathMask:
    """Absolute paths: those that were added, and all others by the folders that this machine has (`/v1/models/x` is
    none)."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        # Now: a server without free descriptors must still be able to write an error.
        self._folders = sorted(set(os.listdir(os.path.abspath(os.sep))) - _BESIDE_FOLDERS)

    def add(self, paths: Iterable[str]) -> None:
        self._known |= {path.rstrip("/") for path in paths if os.path.isabs(path)}
        self._pattern = None

    def hide_folders(self, text: str) -> str:
        """The text with the file name only, in place of every path."""
        if self._pattern is None:
            self._pattern = self._compile()
        return self._pattern.sub(_file_name, text)

    def _compile(self) -> re.Pattern[str]:
        known = [re.escape(path) for path in sorted(self._known, key=len, reverse=True)]
        roots = "|".join([*known, *(rf"/{re.escape(name)}(?=/)" for name in self._folders)])
        return re.compile(rf"(?:file://|(?<![\w.~/-]))(?:{roots}){_PATH_END}|\b[A-Za-z]:\\{_PATH_END}")


def _file_name(found: re.Match[str]) -> str:
    return re.split(r"[/\\]", found[0].rstrip("/\\"))[-1]


_server_paths = PathMask()
add_paths = _server_paths.add
hide_folders = _server_paths.hide_folders
