"""The tokenizer of a GGUF file, through llama.cpp: the same ids as the engine, without loading weights. Only texts for
BERT's vocabularies are split here."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from modelyard import libllama
from modelyard.core.errors import InvalidRequest
from modelyard.core.tokenizer import Detokenizer, FimTokens
from modelyard.tokenizer import slices
from modelyard.tokenizer.detokenize import AddedTokens, TableDetokenizer, TokenTable
from modelyard.tokenizer.shield import spelling_pattern, well_formed

_CONTROL, _USER_DEFINED, _UNUSED = 1 << 3, 1 << 4, 1 << 1
_WORD_PIECES = 3  # llama_vocab_type
_STRIPPING = 1 << 7 | 1 << 8 | 1 << 9  # strips white space or needs a word boundary: not an exact cut


class GgufVocabulary:
    """Owns a vocab-only model, and frees it as soon as no tokenizer and no stream uses it."""

    def __init__(self, path: Path) -> None:
        from modelyard.tokenizer import llama_log

        self._lib = lib = libllama.load()
        self._pieces: dict[int, bytes] = {}  # a call into the library takes microseconds
        params = lib.llama_model_default_params()
        params.vocab_only = True
        # No devices: as soon as a GPU is opened, its driver reserves half a gigabyte.
        no_devices = (ctypes.c_void_p * 1)()
        params.devices = ctypes.addressof(no_devices)
        llama_log.clear()
        self.model: Any = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise InvalidRequest(
                f"{path} has no readable vocabulary: {llama_log.first_error()}", code="tokenizer_broken"
            )
        weakref.finalize(self, lib.llama_model_free, self.model).atexit = False  # the library may be gone by then
        self.handle: Any = lib.llama_model_get_vocab(self.model)
        self.size: int = lib.llama_vocab_n_tokens(self.handle)

    def token_bytes(self, token: int) -> bytes:
        found = self._pieces.get(token)
        if found is None:
            if not 0 <= token < self.size:
                return b""
            found = self._pieces[token] = self.piece(token)
        return found

    def piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        count = self._lib.llama_token_to_piece(self.handle, token, buffer, len(buffer), 0, True)
        if count < 0:
            buffer = ctypes.create_string_buffer(-count)
            count = self._lib.llama_token_to_piece(self.handle, token, buffer, len(buffer), 0, True)
        return buffer.raw[:count]


class WordPieces:
    """BERT's tokenizer. llama.cpp's own drops vowels of Korean and Indian scripts, lowers a vocabulary with capitals,
    and splits words of more than 100 letters, which models know as unknown."""

    def __init__(self, texts: Sequence[str], specials: Mapping[str, int]) -> None:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        # A file marks the beginnings of words, WordPiece what continues one.
        words = [t[1:] if t[:1] == "▁" else t if t[:1] + t[-1:] == "[]" else f"##{t}" for t in texts]
        lowers = all(word == word.lower() for word in words if word not in specials)
        self._tokenizer = Tokenizer(models.WordPiece({word: id for id, word in enumerate(words)}))
        self._tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowers)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._specials, self._spellings = specials, spelling_pattern(specials, group=True)

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        parts = self._spellings.split(text) if parse_special and self._spellings is not None else [text]
        split = self._tokenizer.encode
        return [id for at, part in enumerate(parts) for id in ([self._specials[part]] if at % 2 else split(part).ids)]


class GgufTokenizer:
    """Tokenizing is thread-safe: it changes no state."""

    def __init__(self, path: Path) -> None:
        self._lib = lib = libllama.load()
        self._owner = GgufVocabulary(path)
        self._vocab, self.size = self._owner.handle, self._owner.size
        attributes = {id: lib.llama_vocab_get_attr(self._vocab, id) for id in range(self.size)}
        marked = {id: a for id, a in attributes.items() if a & (_CONTROL | _USER_DEFINED) and not a & _UNUSED}
        texts = {text: id for id in marked if (text := self._text(id))}
        tokens = AddedTokens(
            {text: id for text, id in texts.items() if marked[id] & _CONTROL},
            {text: id for text, id in texts.items() if not marked[id] & _CONTROL},
        )
        self._tokens, self.specials, self.added = tokens, tokens.specials, tokens.added
        spelled = self.specials.keys() & self.added.keys()
        self._spelled, self._spelled_ids = spelling_pattern(spelled), frozenset(self.added[text] for text in spelled)
        self.cuts = frozenset(
            text for text, id in self.specials.items() if marked[id] & _CONTROL and not marked[id] & _STRIPPING
        )
        self.eos = frozenset(id for id in range(self.size) if lib.llama_vocab_is_eog(self._vocab, id))
        first = lib.llama_vocab_bos(self._vocab)
        self.bos = first if lib.llama_vocab_get_add_bos(self._vocab) and first >= 0 else None
        self.bos_token = self._text(first)
        self.begins_prompts = self.bos is not None  # also those of templates, as in llama-server
        self.eos_token = self._text(lib.llama_vocab_eos(self._vocab))
        self._table = TokenTable(self._owner.token_bytes, tokens)
        is_bert = lib.llama_vocab_type(self._vocab) == _WORD_PIECES and "[UNK]" in self.specials
        self._word_pieces = WordPieces(self._raw_texts(), self.specials) if is_bert else None

    def _raw_texts(self) -> list[str]:
        texts = (self._lib.llama_vocab_get_text(self._vocab, id) for id in range(self.size))
        return [text.decode("utf-8", "replace") for text in texts]

    @cached_property
    def spans_words(self) -> bool:
        """See `slices.py`."""
        return slices.spans_words(self._raw_texts())

    @cached_property
    def wrapping(self) -> tuple[list[int], list[int]]:
        """What llama.cpp adds around a text; it depends on the kind of vocabulary and on the file's settings."""
        whole, probe = self._encode("a", parse_special=False, add_special=True), self.encode_plain("a")
        at = next(at for at in range(len(whole)) if whole[at : at + len(probe)] == probe)
        return whole[:at], whole[at + len(probe) :]

    @cached_property
    def fim(self) -> FimTokens | None:
        """By the ids in the metadata, else by the texts that llama.cpp knows."""
        lib, vocab = self._lib, self._vocab
        prefix, suffix, middle = (
            lib.llama_vocab_fim_pre(vocab),
            lib.llama_vocab_fim_suf(vocab),
            lib.llama_vocab_fim_mid(vocab),
        )
        if min(prefix, suffix, middle) < 0:
            return None
        others = (lib.llama_vocab_fim_rep(vocab), lib.llama_vocab_fim_sep(vocab))
        repository, file = (None if id < 0 else id for id in others)
        return FimTokens(prefix, suffix, middle, repository, file)

    def encode_pair(self, first: str, second: str) -> list[int]:
        """As llama-server joins a query and a document: begin, first, end, separator, second, end, each if the file
        adds it."""
        lib, vocab = self._lib, self._vocab
        begin, end, separator = lib.llama_vocab_bos(vocab), lib.llama_vocab_eos(vocab), lib.llama_vocab_sep(vocab)
        end = end if end >= 0 else separator
        starts = [begin] if lib.llama_vocab_get_add_bos(vocab) and begin >= 0 else []
        ends = [end] if lib.llama_vocab_get_add_eos(vocab) and end >= 0 else []
        between = [separator] if lib.llama_vocab_get_add_sep(vocab) and separator >= 0 else []
        return [*starts, *self.encode_plain(first), *ends, *between, *self.encode_plain(second), *ends]

    @property
    def template(self) -> str | None:
        """The chat template in the file's metadata. For some files without one llama.cpp gives the name of a format."""
        text = self.named_template(None)
        return text if text and "{" in text else None

    def named_template(self, name: str | None) -> str | None:
        raw = self._lib.llama_model_chat_template(self._owner.model, name.encode() if name else None)
        return raw.decode("utf-8", "replace") if raw else None

    def encode(self, text: str) -> list[int]:
        return self._encode(text, parse_special=True)

    def encode_plain(self, text: str) -> list[int]:
        """llama.cpp finds USER_DEFINED tokens in every text. Those that are `specials` are cut after their first
        character."""
        ids = self._encode(text, parse_special=False)
        if self._spelled is None or self._spelled_ids.isdisjoint(ids):
            return ids
        cuts = [*(found.start() + 1 for found in self._spelled.finditer(text)), len(text)]
        ids = self._encode(text[: cuts[0]], parse_special=False)
        return ids + [id for start, end in pairwise(cuts) for id in self._encode_rest(text[start:end])]

    def _encode_rest(self, text: str) -> list[int]:
        """A text that continues another one. Some vocabularies would begin it with a space, so it is encoded after a
        line break, which is dropped."""
        ids, raw = self._encode(f"\n{text}", parse_special=False), b""
        for at, id in enumerate(ids):
            raw += self.token_bytes(id)
            if raw.endswith(b"\n"):
                return ids[at + 1 :]
        return self._encode(text, parse_special=False)

    encode_plain_inside = encode_plain

    def _encode(self, text: str, *, parse_special: bool, add_special: bool = False) -> list[int]:
        if self._word_pieces is not None and not add_special:
            return self._word_pieces.encode(well_formed(text), parse_special=parse_special)
        raw = well_formed(text).encode()
        room = len(raw) + 8  # a token has at least one byte; some vocabularies prepend a space
        ids = (ctypes.c_int32 * room)()
        count = self._lib.llama_tokenize(self._vocab, raw, len(raw), ids, room, add_special, parse_special)
        if count < 0:
            raise InvalidRequest("the text cannot be tokenized", code="tokenizer_failed")
        return ids[:count]

    def decode(self, ids: Sequence[int], *, specials: bool = True) -> str:
        raw = b"".join(self.token_bytes(id) for id in ids if specials or id not in self._tokens.texts)
        return raw.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return self._owner.token_bytes(token)

    def _text(self, token: int) -> str:
        return self._owner.piece(token).decode("utf-8", "replace") if token >= 0 else ""

    def detokenizer(self) -> Detokenizer:
        return TableDetokenizer(self._table)
