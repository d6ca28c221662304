"""Where a prompt may be cut so that its parts tokenize as the whole does, told by the tokenizer's own description.

Tokenizers look for their added tokens first and then treat each stretch between them alone: normalizer, pre-tokenizer
and model never see across one. So a cut at an added token is exact if that token is certainly found there:

- it is searched in the raw text (`normalized` false) and takes no neighbours along (`lstrip`, `rstrip`, `single_word`);
- no other added token contains it or can end inside it, for then the other one might win;
- no token asks what stands next to it (`single_word` anywhere rules all cuts out);
- the steps are ones we know to work stretch by stretch, and the model is no lottery (`dropout`).

Only the start of the text is special (a Metaspace that prepends to the first stretch): the token cache keys it apart.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from tokenizers import PreTokenizedString
from tokenizers import Tokenizer as HfTokenizer

from modelyard.core.errors import InvalidRequest
from modelyard.core.tokenizer import Detokenizer
from modelyard.tokenizer import detokenize
from modelyard.tokenizer.detokenize import PrefixDetokenizer, TableDetokenizer, TokenTable
from modelyard.tokenizer.folder import Ends, read_ends, read_text, tokenizer_file
from modelyard.tokenizer.shield import Spellings, spelling_pattern, well_formed
from modelyard.tokenizer.word_cache import Words, ascii_pattern

# fmt: off
_STEPS = frozenset({
    "BertNormalizer", "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Lowercase",
    "Metaspace", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Punctuation", "Replace", "Sequence",
    "Split", "Strip", "StripAccents", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
})
# fmt: on


class Added(Struct, frozen=True):
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class ModelPart(Struct, frozen=True):
    type: str | None = None
    dropout: float | None = None
    unk_token: str | None = None


class TokenizerFile(Struct, frozen=True):
    """What we read of a tokenizer.json; the vocabulary itself is left to the library."""

    added_tokens: list[Added] = field(default_factory=list)
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    model: ModelPart = ModelPart()


def exact_cuts(file: TokenizerFile) -> frozenset[str]:
    if not _works_in_stretches(file):
        return frozenset()
    raw = [token.content for token in file.added_tokens if not token.normalized]
    everything = "\0".join(raw)
    endings = {content[at:] for content in raw for at in range(1, len(content))}
    return frozenset(
        token.content
        for token in file.added_tokens
        if _stands_alone(token) and everything.count(token.content) == 1 and not _may_overlap(token.content, endings)
    )


def _works_in_stretches(file: TokenizerFile) -> bool:
    known = all(step in _STEPS for step in _steps(file.normalizer)) and all(
        step in _STEPS for step in _steps(file.pre_tokenizer)
    )
    return known and not file.model.dropout and not any(token.single_word for token in file.added_tokens)


def _steps(part: dict[str, Any] | None) -> Iterator[str]:
    if part is None:
        return
    yield str(part.get("type"))
    inner: Sequence[dict[str, Any]] = part.get("normalizers") or part.get("pretokenizers") or ()
    for step in inner:
        yield from _steps(step)


def _stands_alone(token: Added) -> bool:
    plain = not (token.normalized or token.lstrip or token.rstrip)
    return plain and len(token.content) > 1 and token.content == token.content.strip() and "\0" not in token.content


def _may_overlap(content: str, endings: set[str]) -> bool:
    return any(content[:length] in endings for length in range(1, len(content)))


# Ordinary text to ids with the added tokens out of play: their spellings are letters like any others.
#
# The library's own switch (`encode_special_tokens`) spares added tokens that are not flagged special, such as a family's
# `<tool_call>`, and would need a second copy of the vocabulary. So the steps of the pipeline are run one by one here,
# without the step that looks for added tokens. Slower, but only text that spells a control token comes this way.

_BEFORE = "x"  # stands before a text that is not the start of the prompt; its own tokens are dropped


class PlainEncoder:
    def __init__(self, tokenizer: HfTokenizer, controls: Mapping[str, int], unknown: str | None) -> None:
        self._tokenizer = tokenizer
        self._controls = frozenset(id for text, id in controls.items() if text != unknown)
        self._pattern = spelling_pattern(text for text in controls if len(text) > 1)

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """`start` is False for text that goes on from something: some tokenizers put a space before the start."""
        if not text:
            return []
        ids = self._run(text, start)
        if self._controls.isdisjoint(ids):
            return ids
        return self._apart(text, ids, start)

    def _run(self, text: str, start: bool) -> list[int]:
        tokenizer = self._tokenizer
        run = PreTokenizedString(text if start else _BEFORE + text)
        if not start:
            run.split(lambda _, whole: [whole[:1], whole[1:]])
        if tokenizer.normalizer is not None:
            run.normalize(tokenizer.normalizer.normalize)
        if tokenizer.pre_tokenizer is not None:
            tokenizer.pre_tokenizer.pre_tokenize(run)
        run.tokenize(tokenizer.model.tokenize)
        encoding = run.to_encoding()
        if start:
            return list(encoding.ids)
        return [id for id, (begin, _) in zip(encoding.ids, encoding.offsets, strict=True) if begin > 0]

    def _apart(self, text: str, ids: list[int], start: bool) -> list[int]:
        """A model that holds control tokens among its words (Unigram does) must not see the spelling in one piece."""
        found = self._pattern.search(text) if self._pattern else None
        if found is None:
            return [id for id in ids if id not in self._controls]
        middle = found.start() + 1
        return self.encode(text[:middle], start=start) + self.encode(text[middle:], start=False)


# A vocabulary from a Hugging Face folder or a tokenizer.json, over the `tokenizers` library.

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
        self._family = detokenize.family_of(file.decoder)
        self._falls_back = any(p["type"] == "ByteFallback" for p in detokenize.decoder_parts(file.decoder))
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
            return spelling.encode() if token in self._added else detokenize.byte_level(spelling)
        if self._family == "sentencepiece":
            return detokenize.sentencepiece(spelling, self._falls_back)
        return self.decode([token]).encode()

    def detokenizer(self) -> Detokenizer:
        if self._family == "other":
            return PrefixDetokenizer(self.decode, self._control_texts)
        return TableDetokenizer(self._table)


def _is_control(token: Added) -> bool:
    return token.special or _MARKER.fullmatch(token.content) is not None
