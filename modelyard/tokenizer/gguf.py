"""A vocabulary from a GGUF file, through llama.cpp itself: the same ids as the engine, without loading any weights."""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib

from modelyard.core.errors import InvalidRequest
from modelyard.core.tokenizer import Detokenizer
from modelyard.tokenizer.detokenize import TableDetokenizer, TokenTable

# Text that UTF-8 cannot spell, made into text that it can.


def well_formed(text: str) -> str:
    """Lone surrogates, which JSON can spell and UTF-8 cannot, become U+FFFD; pairs become their character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# What llama.cpp says while it works: never to the terminal, and its complaints to whoever asked for the work.
#
# llama.cpp tells why a file is bad only through its log callback, which it has one of a process. The callback runs on the
# thread that called in, so each thread hears its own complaints and two loads at a time do not mix theirs.

log = logging.getLogger("modelyard.llama_cpp")

_WARNING, _ERROR, _CONTINUED = 3, 4, 5  # GGML_LOG_LEVEL_…
_SPEAKER = re.compile(r"^\w+: (error loading model: )?")  # the C function that complains


class _Heard(threading.local):
    """A thread's own complaints, oldest first."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=50)


_heard = _Heard()


def _listen(level: int, text: bytes | None, _: Any) -> None:
    if level < _WARNING or level == _CONTINUED or not text:
        return
    line = text.decode("utf-8", "replace").strip()
    log.debug("%s", line)
    if level == _ERROR:
        _heard.lines.append(line)


_listener: Any = lib.llama_log_callback(_listen)  # held for good: C keeps its address


def forget() -> None:
    """Before a piece of work: what is heard from now on is about it. The binding brings a callback of its own that
    prints, so ours is set each time."""
    lib.llama_log_set(_listener, None)
    _heard.lines.clear()


def reason() -> str:
    """Why what this thread did last went wrong, in llama.cpp's own words: the first complaint names the cause, those
    after it only say that somebody above failed, too."""
    first = _heard.lines[0] if _heard.lines else "llama.cpp gave no reason"
    return _SPEAKER.sub("", first)


forget()


_CONTROL, _USER_DEFINED, _UNUSED = 1 << 3, 1 << 4, 1 << 1
_STRIPPING = 1 << 7 | 1 << 8 | 1 << 9  # takes white space around it away, or wants a word's border: no exact cut


class GgufTokenizer:
    """Holds a vocab-only model for as long as it lives. Tokenizing is safe from several threads: it changes nothing."""

    def __init__(self, path: Path) -> None:
        from llama_cpp import llama_cpp as lib

        pass

        self._lib = lib
        self._pieces: dict[int, bytes] = {}  # those that were asked for: asking the library takes microseconds
        params = lib.llama_model_default_params()
        params.vocab_only = True
        # On no device: to look at a GPU is enough for the driver to set half a gigabyte of its memory aside.
        nowhere = (ctypes.c_void_p * 1)()
        params.devices = ctypes.addressof(nowhere)
        forget()
        self._model: Any = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise InvalidRequest(f"{path} has no readable vocabulary: {reason()}", code="tokenizer_broken")
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.size: int = lib.llama_vocab_n_tokens(self._vocab)
        attributes = {id: lib.llama_vocab_get_attr(self._vocab, id) for id in range(self.size)}
        marked = {id: a for id, a in attributes.items() if a & (_CONTROL | _USER_DEFINED) and not a & _UNUSED}
        texts = {id: self._piece(id) for id in marked}
        self.specials = {raw.decode("utf-8", "replace"): id for id, raw in texts.items() if raw}
        self.cuts = frozenset(
            text for text, id in self.specials.items() if marked[id] & _CONTROL and not marked[id] & _STRIPPING
        )
        self.eos = frozenset(id for id in range(self.size) if lib.llama_vocab_is_eog(self._vocab, id))
        first = lib.llama_vocab_bos(self._vocab)
        self.bos = first if lib.llama_vocab_get_add_bos(self._vocab) and first >= 0 else None
        self.bos_token = self._text(first)
        self.eos_token = self._text(lib.llama_vocab_eos(self._vocab))
        self._table = TokenTable(self.token_bytes, {id: text for text, id in self.specials.items()})

    def __del__(self) -> None:
        model, self._model = getattr(self, "_model", None), None
        if model:
            self._lib.llama_model_free(model)

    @property
    def template(self) -> str | None:
        """The chat template in the file's metadata."""
        return self.named_template(None)

    def named_template(self, name: str | None) -> str | None:
        raw = self._lib.llama_model_chat_template(self._model, name.encode() if name else None)
        return raw.decode("utf-8", "replace") if raw else None

    def encode(self, text: str) -> list[int]:
        return self._encode(text, parse_special=True)

    def encode_plain(self, text: str) -> list[int]:
        return self._encode(text, parse_special=False)

    encode_plain_inside = encode_plain

    def _encode(self, text: str, *, parse_special: bool) -> list[int]:
        raw = well_formed(text).encode()
        room = len(raw) + 8  # a token is at least a byte, but for a space that some vocabularies put in front
        ids = (ctypes.c_int32 * room)()
        count = self._lib.llama_tokenize(self._vocab, raw, len(raw), ids, room, False, parse_special)
        if count < 0:
            raise InvalidRequest("the text cannot be tokenized", code="tokenizer_failed")
        return ids[:count]

    def decode(self, ids: Sequence[int], *, specials: bool = True) -> str:
        known = set(self.specials.values())
        raw = b"".join(self.token_bytes(id) for id in ids if specials or id not in known)
        return raw.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        found = self._pieces.get(token)
        if found is None:
            if not 0 <= token < self.size:
                return b""
            found = self._pieces[token] = self._piece(token)
        return found

    def _piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        count = self._lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        if count < 0:
            buffer = ctypes.create_string_buffer(-count)
            count = self._lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[:count]

    def _text(self, token: int) -> str:
        return self._piece(token).decode("utf-8", "replace") if token >= 0 else ""

    def detokenizer(self) -> Detokenizer:
        return TableDetokenizer(self._table)
