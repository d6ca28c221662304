"""A vocabulary from a Hugging Face folder or a tokenizer.json, over the `tokenizers` library."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer as HfTokenizer

from modelyard.core.errors import InvalidRequest
from modelyard.core.tokenizer import Detokenizer
from modelyard.tokenizer import alphabet
from modelyard.tokenizer.cuts import Added, TokenizerFile, exact_cuts
from modelyard.tokenizer.detokenize import PrefixDetokenizer, TableDetokenizer, TokenTable
from modelyard.tokenizer.folder import Ends, read_ends, read_text, tokenizer_file
from modelyard.tokenizer.plain import PlainEncoder
from modelyard.tokenizer.spellings import Spellings
from modelyard.tokenizer.surrogates import well_formed
from modelyard.tokenizer.words import Words, ascii_pattern

# Families add markers such as <tool_call> without flagging them special. They steer all the same; HTML tags and runs of
# spaces, which some vocabularies also add, do not: no HTML tag has an underscore or a colon in its name.
_MARKER = re.compile(
    r"<\|.+\|>|<｜.+｜>|\[/?[A-Z][A-Z_]+\]|</?(?:think|thinking|reasoning)>|</?[A-Za-z]+(?:[_:][A-Za-z]+)+>"
)
_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end_of_turn|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
)
_decoder = msgspec.json.Decoder(TokenizerFile)

# The library would share a handful of words between threads, and take three times as long.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class HuggingFaceTokenizer:
    """`bos_token` and `eos_token` are the texts that templates ask for; `bos` is the id that begins a raw prompt."""

    def __init__(self, tokenizer: HfTokenizer, file: TokenizerFile, ends: Ends = Ends()) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._added = {token.id: token for token in file.added_tokens}
        self.size = max([tokenizer.get_vocab_size(), *(id + 1 for id in self._added)])
        self.specials = {token.content: token.id for token in file.added_tokens if _is_control(token)}
        self.cuts = exact_cuts(file).intersection(self.specials)
        self.bos_token, self.eos_token = ends.bos_token, ends.eos_token
        self.bos = self._bos(ends)
        self.eos = self._eos(ends)
        self._control_texts = {id: text for text, id in self.specials.items()}
        self._plain = PlainEncoder(tokenizer, self.specials, file.model.unk_token)
        self._family = alphabet.family_of(file.decoder)
        self._falls_back = any(p["type"] == "ByteFallback" for p in alphabet.decoder_parts(file.decoder))
        self._table = TokenTable(self.token_bytes, self._control_texts)
        pattern = ascii_pattern(file)
        spellings = Spellings(token.content for token in file.added_tokens)
        self.words = Words(pattern, spellings, self._encode_all) if pattern is not None else None

    @classmethod
    def load(cls, path: Path) -> HuggingFaceTokenizer:
        file = tokenizer_file(path)
        return cls.from_text(read_text(file), ends=read_ends(file.parent), where=str(file))

    @classmethod
    def from_text(cls, text: str, *, ends: Ends = Ends(), where: str = "the tokenizer") -> HuggingFaceTokenizer:
        try:
            file = _decoder.decode(text)
            tokenizer = HfTokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise InvalidRequest(
                f"{where} is not a valid tokenizer.json: {error}. Download it again from the source model's repository",
                code="tokenizer_broken",
            ) from error
        return cls(tokenizer, file, ends)

    @property
    def template(self) -> str | None:
        """A folder's template lies beside the tokenizer: `prompt/template_source.py` looks for it."""
        return None

    def _bos(self, ends: Ends) -> int | None:
        id = self._tokenizer.token_to_id(ends.bos_token) if ends.bos_token else None
        if ends.adds_bos is not None:
            return id if ends.adds_bos else None
        begun = self._tokenizer.encode("", add_special_tokens=True).ids
        return begun[0] if begun and id in (None, begun[0]) and begun[0] in self._added else None

    def _eos(self, ends: Ends) -> frozenset[int]:
        texts = (ends.eos_token, *(text for text in _TURN_ENDS if text in self.specials and self._ends_a_turn(text)))
        found = {self._tokenizer.token_to_id(text) for text in texts if text}
        return frozenset(id for id in found | set(ends.eos_ids) if id is not None)

    def _ends_a_turn(self, text: str) -> bool:
        """Where messages have channels, `<|end|>` ends one message of several in a turn."""
        return text != "<|end|>" or "<|channel|>" not in self.specials

    def encode(self, text: str) -> list[int]:
        if self.words is not None and (ids := self.words.encode(text)) is not None:
            return ids
        try:
            return self._encode(text)
        except (TypeError, UnicodeEncodeError):
            return self._encode(well_formed(text))

    def _encode(self, text: str) -> list[int]:
        """As a batch of one: the library's plain `encode` keeps the interpreter locked while it works."""
        return self._encode_all([text])[0]

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        return [made.ids for made in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_plain(self, text: str) -> list[int]:
        return self._plain.encode(well_formed(text))

    def encode_plain_inside(self, text: str) -> list[int]:
        return self._plain.encode(well_formed(text), start=False)

    def decode(self, ids: Sequence[int], *, specials: bool = True) -> str:
        if not specials:
            ids = [id for id in ids if id not in self._control_texts]
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """Empty for an id that names no token: models have more rows than their vocabularies have words."""
        if token in self._control_texts:
            return self._control_texts[token].encode()
        spelling = self._tokenizer.id_to_token(token) if token >= 0 else None
        if spelling is None:
            return b""
        if self._family == "byte_level":
            return spelling.encode() if token in self._added else alphabet.byte_level(spelling)
        if self._family == "sentencepiece":
            return alphabet.sentencepiece(spelling, self._falls_back)
        return self.decode([token]).encode()

    def detokenizer(self) -> Detokenizer:
        if self._family == "other":
            return PrefixDetokenizer(self.decode, self._control_texts)
        return TableDetokenizer(self._table)


def _is_control(token: Added) -> bool:
    return token.special or _MARKER.fullmatch(token.content) is not None
