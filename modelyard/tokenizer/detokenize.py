"""Streaming detokenizers: token ids to text, one detokenizer per stream, never half a character.

`TableDetokenizer` knows each token's bytes and runs them through an incremental UTF-8 decoder; most tokens are whole
characters and cost one table lookup. `PrefixDetokenizer` is for decoders that no table can express (WordPiece and the
like): it decodes a window again for each token and emits what is new.

Both emit one piece per token (empty while a character is incomplete). Before a control token and at the end they emit
one piece without a token for bytes that no later token can complete.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from modelyard.core.tokenizer import IdLogprob, Piece

# A token's bytes, for the tokenizer families whose decoder works token by token:
#
# - byte level (GPT-2's alphabet): every byte is a printable character, "Ġ" is a space;
# - sentencepiece: "▁" is a space, `<0xNN>` is one byte if the decoder has byte fallback;
# - other: only the decoder knows.

Family = Literal["byte_level", "sentencepiece", "other"]

_PRINTABLE = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def _byte_of_character() -> dict[str, int]:
    """Printable Latin-1 maps to itself; the other bytes follow from U+0100 on."""
    own = [byte for run in _PRINTABLE for byte in run]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_of_character()


def decoder_parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]


def family_of(decoder: dict[str, Any] | None) -> Family:
    parts = decoder_parts(decoder)
    types = {part.get("type") for part in parts}
    if types == {"ByteLevel"}:
        return "byte_level"
    if types and types <= _SENTENCEPIECE and all(_replaces_only_spaces(part) for part in parts):
        return "sentencepiece"
    return "other"


def _replaces_only_spaces(part: dict[str, Any]) -> bool:
    if part["type"] == "Replace":
        return part.get("pattern") == {"String": "▁"} and part.get("content") == " "
    if part["type"] == "Metaspace":
        return bool(part.get("replacement", "▁") == "▁")
    return part["type"] != "Strip" or part.get("content") == " "


def byte_level(spelling: str) -> bytes:
    try:
        return bytes([BYTE_OF[character] for character in spelling])
    except KeyError:  # not in the alphabet: an added token, spelled as it reads
        return spelling.encode()


def sentencepiece(spelling: str, byte_fallback: bool) -> bytes:
    if byte_fallback and (found := _BYTE.fullmatch(spelling)):
        return bytes.fromhex(found[1])
    return spelling.replace("▁", " ").encode()


# Families also write their markup with tokens that are not flagged as control tokens, such as <tool_call>. HTML tags
# and runs of spaces, which some vocabularies add, are text: no HTML tag name has an underscore, a bar or a colon.
_MARKUP = re.compile(
    r"<\|.+>|<.+\|>|<?｜.+｜>?|\]<\].+\[>\[|\[/?[A-Z][A-Z_]+\]|</?(?:think|thinking|reasoning|response|answer)>"
    r"|</?[A-Za-z]+(?:[_:][A-Za-z]+)+>"
)


def is_markup(text: str) -> bool:
    """Whether an added token counts as markup: grammars name it by its id, and prompts do not spell it."""
    return _MARKUP.fullmatch(text) is not None


class AddedTokens:
    """The tokens that a vocabulary lists beside its words: `control` tokens (llama.cpp's CONTROL, Hugging Face's
    `special`), and `added` ones (USER_DEFINED), which are text unless the model's output format names them."""

    def __init__(self, control: Mapping[str, int], added: Mapping[str, int]) -> None:
        self.added = added
        self.specials = {**control, **{text: id for text, id in added.items() if is_markup(text)}}
        self.texts = {id: text for text, id in self.specials.items()}
        self._control_ids, self._added_ids = frozenset(control.values()), frozenset(added.values())

    def piece(self, text: str, token: int) -> Piece:
        return Piece(text, token in self._control_ids, token, added=token in self._added_ids)


_utf8 = codecs.getincrementaldecoder("utf-8")
_UNKNOWN = "\ufffd"


class TokenTable:
    """The bytes and pieces of a vocabulary, filled on demand.

    Shared by all streams of a model. Thread-safe: a race only computes the same entry twice.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], tokens: AddedTokens) -> None:
        self.whole: dict[int, Piece] = {}  # tokens of whole characters
        self.broken: dict[int, bytes] = {}  # tokens with incomplete characters
        self._tokens, self._bytes = tokens, token_bytes

    def learn(self, token: int) -> Piece | None:
        """The token's piece, or None if its bytes are incomplete without their neighbours."""
        if token in self.broken:
            return None
        data = self._bytes(token)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            self.broken[token] = data
            return None
        return self.whole.setdefault(token, self._tokens.piece(text, token))


class TableDetokenizer:
    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._whole = table.whole
        self._utf8: codecs.IncrementalDecoder | None = None  # created for the first incomplete character
        self._pending = False

    def feed(self, ids: Sequence[int], logprobs: Sequence[IdLogprob] | None = None) -> list[Piece]:
        out: list[Piece] = []
        try:
            if not self._pending:
                out = [*map(self._whole.__getitem__, ids)]  # the common case: every token is known and complete
        except KeyError:
            pass
        if not out:
            for token in ids:
                self._feed_one(token, out)
        return out if logprobs is None else with_logprobs(out, logprobs)

    def _feed_one(self, token: int, out: list[Piece]) -> None:
        piece = self._whole.get(token) or self._table.learn(token)
        if piece is not None and (piece.special or piece.added):
            out += self.finish()
        elif piece is None or self._pending:
            data = self._table.broken[token] if piece is None else piece.text.encode()
            self._utf8 = utf8 = self._utf8 or _utf8("replace")
            piece = Piece(utf8.decode(data), False, token)
            self._pending = bool(utf8.getstate()[0])
        out.append(piece)

    def finish(self, truncated: bool = False) -> list[Piece]:
        if not self._pending or self._utf8 is None:
            return []
        rest = "" if truncated else self._utf8.decode(b"", True)
        self._utf8.reset()
        self._pending = False
        return [Piece(rest)] if rest else []


class PrefixDetokenizer:
    """Exact if the decoder looks back at most `_WINDOW` tokens; all known ones look back one."""

    _WINDOW = 32
    _MAX_HELD = 4  # bytes of the longest character; what is incomplete after that stays so

    def __init__(self, decode: Callable[[Sequence[int]], str], tokens: AddedTokens) -> None:
        self._decode, self._tokens = decode, tokens
        self._ids: list[int] = []
        self._shown = ""
        self._held = 0

    def feed(self, ids: Sequence[int], logprobs: Sequence[IdLogprob] | None = None) -> list[Piece]:
        out: list[Piece] = []
        for token in ids:
            if token in self._tokens.texts:
                out += self.finish()
                out.append(self._tokens.piece(self._tokens.texts[token], token))
            else:
                out.append(Piece(self._next(token), False, token))
        return out if logprobs is None else with_logprobs(out, logprobs)

    def _next(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(_UNKNOWN) and self._held + 1 < self._MAX_HELD:
            self._held += 1
            return ""
        return self._show(text)

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._held, self._shown = 0, text
        if len(self._ids) > self._WINDOW:
            self._ids = self._ids[-self._WINDOW // 2 :]
            self._shown = self._decode(self._ids)
        return new

    def finish(self, truncated: bool = False) -> list[Piece]:
        if not self._held:
            return []
        text = self._show(self._decode(self._ids))
        text = text.rstrip(_UNKNOWN) if truncated else text
        return [Piece(text)] if text else []


def with_logprobs(pieces: Sequence[Piece], logprobs: Sequence[IdLogprob]) -> list[Piece]:
    """Add each token's logprob to its piece; pieces without a token have none."""
    rest = iter(logprobs)
    return [p if p.token < 0 else Piece(p.text, p.special, p.token, next(rest, None), p.added) for p in pieces]
