"""Hugging Face tokenizers (a folder or a tokenizer.json), over the `tokenizers` library.

Prompts are split at control tokens so that no part is tokenized twice (`prefix_cache.py`). A split is exact if the
parts tokenize as the whole does. Tokenizers find their added tokens first and process each stretch between them alone.
So a split at an added token is exact if that token is certainly found there:

- it is searched in the raw text (`normalized` false) and takes no neighbours (`lstrip`, `rstrip`, `single_word`);
- no other added token contains it or can end inside it, because the other one might win;
- no token depends on its neighbours (`single_word` anywhere rules out all splits);
- all pipeline steps are known to work stretch by stretch, and the model is deterministic (no `dropout`).

Only the start of the text is special (Metaspace prepends to the first stretch); the token cache keys it separately.

Which tokens begin and end a text is in the files beside tokenizer.json.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from tokenizers import PreTokenizedString
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.models import BPE

from modelyard.core.errors import InvalidRequest
from modelyard.core.tokenizer import Detokenizer, FimTokens
from modelyard.tokenizer import detokenize, slices
from modelyard.tokenizer.detokenize import AddedTokens, PrefixDetokenizer, TableDetokenizer, TokenTable
from modelyard.tokenizer.patterns import is_linear, regexes
from modelyard.tokenizer.shield import TokenSpellings, spelling_pattern, well_formed
from modelyard.tokenizer.word_cache import WordCache, ascii_pattern, breaks_at_spaces


class SpecialTokens(Struct, frozen=True):
    """The tokens that begin and end a turn, and more ids that end one. `adds_bos` None: unspecified."""

    bos_token: str = ""
    eos_token: str = ""
    eos_ids: tuple[int, ...] = ()
    adds_bos: bool | None = None


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json at or in this path."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidRequest(
            f"there is no tokenizer at {file}: point tokenizer_path to a folder with a tokenizer.json (download it "
            "from the source model's repository) or to the file itself",
            code="tokenizer_missing",
        )
    return file


def read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}", code="tokenizer_broken") from error


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in this file; empty if the file is missing, an error that names the file if it is invalid."""
    if not file.is_file():
        return {}
    try:
        value = msgspec.json.decode(read_text(file))
    except msgspec.DecodeError as error:
        raise _broken(file, str(error)) from error
    if not isinstance(value, dict):
        raise _broken(file, "it does not contain an object")
    return value


def _broken(file: Path, why: str) -> InvalidRequest:
    return InvalidRequest(f"{file} is not a valid JSON file: {why}. Download it again", code="tokenizer_broken")


def read_special_tokens(folder: Path) -> SpecialTokens:
    config = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    generation = read_json(folder / "generation_config.json")
    adds = config.get("add_bos_token")
    return SpecialTokens(
        _text(config, "bos_token"),
        _text(config, "eos_token"),
        tuple(_ids(generation.get("eos_token_id"))),
        adds if isinstance(adds, bool) else None,
    )


def _text(config: Mapping[str, Any], name: str) -> str:
    """A token is a string or an object with `content`."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _ids(value: Any) -> Iterator[int]:
    for id in value if isinstance(value, list) else [value]:
        if isinstance(id, int):
            yield id


# fmt: off
_STEPS = frozenset({
    "BertNormalizer", "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Lowercase",
    "Metaspace", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Punctuation", "Replace", "Sequence",
    "Split", "Strip", "StripAccents", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
})
# fmt: on


class AddedToken(Struct, frozen=True):
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class TokenizerModel(Struct, frozen=True):
    type: str | None = None
    dropout: float | None = None
    unk_token: str | None = None


class BpeModel(Struct, frozen=True):
    """A model of the type BPE whole: what the library's class takes."""

    vocab: dict[str, int]
    merges: list[str | tuple[str, str]]
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool | None = None
    byte_fallback: bool | None = None
    ignore_merges: bool | None = None

    def without_cache(self) -> BPE:
        """The library's cache of words, one per thread and model, outlives the model: up to 4 MiB for each load."""
        merges = [tuple(one.split(" ", 1)) if isinstance(one, str) else one for one in self.merges]
        options = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return BPE(**(options | {"merges": merges, "cache_capacity": 0}))


class _BpeFile(Struct, frozen=True):
    model: BpeModel


class TokenizerFile(Struct, frozen=True):
    """The parts of a tokenizer.json that are read here; the library reads the vocabulary."""

    added_tokens: list[AddedToken] = field(default_factory=list)
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    model: TokenizerModel = TokenizerModel()


def exact_split_points(file: TokenizerFile) -> frozenset[str]:
    if not _processes_stretches(file):
        return frozenset()
    raw = [token.content for token in file.added_tokens if not token.normalized]
    everything = "\0".join(raw)
    endings = {content[at:] for content in raw for at in range(1, len(content))}
    return frozenset(
        token.content
        for token in file.added_tokens
        if _is_exact(token) and everything.count(token.content) == 1 and not _may_overlap(token.content, endings)
    )


def _processes_stretches(file: TokenizerFile) -> bool:
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


def _is_exact(token: AddedToken) -> bool:
    plain = not (token.normalized or token.lstrip or token.rstrip)
    return plain and len(token.content) > 1 and token.content == token.content.strip() and "\0" not in token.content


def _may_overlap(content: str, endings: set[str]) -> bool:
    return any(content[:length] in endings for length in range(1, len(content)))


_FILLER = "x"  # before a text that is not the start of the prompt; its tokens are dropped


class PlainEncoder:
    """Encodes text without added tokens: their spellings are ordinary characters.

    The library's switch (`encode_special_tokens`) does not cover added tokens that are not flagged special, such as
    `<tool_call>`, and would need a second copy of the vocabulary. So this class runs the pipeline's steps without the
    search for added tokens. That is slower, but only text that spells a control token needs it.
    """

    def __init__(
        self, tokenizer: HfTokenizer, controls: Mapping[str, int], unknown: str | None, vet: Vet | None = None
    ) -> None:
        self._tokenizer, self._vet = tokenizer, vet
        self._controls = frozenset(id for text, id in controls.items() if text != unknown)
        self._pattern = spelling_pattern(text for text in controls if len(text) > 1)

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """`start`: the text begins the prompt. Some tokenizers prepend a space there."""
        if not text:
            return []
        ids = self._run(text, start)
        if self._controls.isdisjoint(ids):
            return ids
        return self._encode_split(text, ids, start)

    def _run(self, text: str, start: bool) -> list[int]:
        tokenizer = self._tokenizer
        if self._vet is not None:
            self._vet(text, True)
        run = PreTokenizedString(text if start else _FILLER + text)
        if not start:
            run.split(lambda _, whole: [whole[:1], whole[1:]])
        if tokenizer.normalizer is not None:
            run.normalize(tokenizer.normalizer.normalize)
        if tokenizer.pre_tokenizer is not None:
            with _failing():
                tokenizer.pre_tokenizer.pre_tokenize(run)
        run.tokenize(tokenizer.model.tokenize)
        encoding = run.to_encoding()
        if start:
            return list(encoding.ids)
        return [id for id, (begin, _) in zip(encoding.ids, encoding.offsets, strict=True) if begin > 0]

    def _encode_split(self, text: str, ids: list[int], start: bool) -> list[int]:
        """A model whose vocabulary contains control tokens (Unigram) must not see the spelling in one piece."""
        found = self._pattern.search(text) if self._pattern else None
        if found is None:
            return [id for id in ids if id not in self._controls]
        middle = found.start() + 1
        return self.encode(text[:middle], start=start) + self.encode(text[middle:], start=False)


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
# Model families spell the tokens around a gap differently.
_FIM_PREFIXES = (
    "<|fim_prefix|>",
    "<fim_prefix>",
    "<fim-prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "<|code_prefix|>",
)
_FIM_SUFFIXES = (
    "<|fim_suffix|>",
    "<fim_suffix>",
    "<fim-suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "<|code_suffix|>",
)
_FIM_MIDDLES = ("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>")
_FIM_REPOSITORIES = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>", "<REPO>")
_FIM_FILES = ("<|file_sep|>", "<file_sep>")
_decoder = msgspec.json.Decoder(TokenizerFile)
_bpe_decoder = msgspec.json.Decoder(_BpeFile)

# The library would distribute a handful of words over threads, which takes three times as long.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


Vet = Callable[[str, bool], None]  # raises if a text takes too long to split; whether without added tokens


def without_vocabulary(text: str) -> str:
    """A tokenizer.json that splits texts as this one, and finds no word."""
    file = msgspec.json.decode(text)
    kept = {name: file.get(name) for name in ("version", "added_tokens", "normalizer", "pre_tokenizer")}
    return msgspec.json.encode(kept | {"model": {"type": "BPE", "vocab": {}, "merges": []}}).decode()


def unknown_patterns(text: str, *parts: str) -> list[str]:
    """The patterns of these parts of a tokenizer.json that may take more than linear time. One that cannot be read has
    none."""
    try:
        file = _decoder.decode(text)
    except msgspec.DecodeError:
        return []
    return [one for one in regexes([getattr(file, part) for part in parts]) if not is_linear(one)]


@contextmanager
def _failing() -> Iterator[None]:
    """The library panics where a pattern takes too many steps, and a panic is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidRequest(
            "the model's tokenizer cannot split this text: its pattern takes too many steps", code="tokenizer_failed"
        ) from None


def encode_all(tokenizer: HfTokenizer, vet: Vet | None, texts: list[str]) -> list[list[int]]:
    if vet is not None:
        for text in texts:
            vet(text, False)
    with _failing():
        return [made.ids for made in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


class TokenBytes:
    """The bytes of a token id."""

    def __init__(
        self,
        tokenizer: HfTokenizer,
        added: frozenset[int],
        control_texts: Mapping[int, str],
        decoder: dict[str, Any] | None,
    ) -> None:
        self._tokenizer, self._control_texts = tokenizer, control_texts
        # An added token that is also a word of the model is spelled like one: some vocabularies add "Ċ", a line break.
        texts = {id: tokenizer.id_to_token(id) or "" for id in added}
        self._added = frozenset(id for id, text in texts.items() if tokenizer.model.token_to_id(text) != id)
        self._family = detokenize.family_of(decoder)
        self._byte_fallback = any(p["type"] == "ByteFallback" for p in detokenize.decoder_parts(decoder))

    def __call__(self, token: int) -> bytes:
        if token in self._control_texts:
            return self._control_texts[token].encode()
        spelling = self._tokenizer.id_to_token(token) if token >= 0 else None
        if spelling is None:
            return b""
        if self._family == "byte_level":
            return spelling.encode() if token in self._added else detokenize.byte_level(spelling)
        if self._family == "sentencepiece":
            return detokenize.sentencepiece(spelling, self._byte_fallback)
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()


class HuggingFaceTokenizer:
    """`bos_token` and `eos_token` are the texts that templates use; `bos` is the id that begins a raw prompt. `vet`
    is called with each text, before it is split."""

    def __init__(
        self,
        tokenizer: HfTokenizer,
        file: TokenizerFile,
        special: SpecialTokens = SpecialTokens(),
        vet: Vet | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._vet = tokenizer, vet
        self._added = {token.id: token for token in file.added_tokens}
        patterns = regexes([file.normalizer, file.pre_tokenizer, file.decoder])
        self.is_linear = all(map(is_linear, patterns))  # in the length of a text
        self.size = max([tokenizer.get_vocab_size(), *(id + 1 for id in self._added)])
        tokens = AddedTokens(
            {token.content: token.id for token in file.added_tokens if token.special},
            {token.content: token.id for token in file.added_tokens if not token.special},
        )
        self._tokens, self.specials, self.added = tokens, tokens.specials, tokens.added
        self.cuts = exact_split_points(file).intersection(self.specials)
        self.bos_token, self.eos_token = special.bos_token, special.eos_token
        self.bos = self._bos(special)
        self.eos = self._eos(special)
        self._plain = PlainEncoder(tokenizer, self.specials, file.model.unk_token, vet)
        self._family = detokenize.family_of(file.decoder)
        # Neither these functions nor what holds them refers to `self`: a vocabulary that is no longer used is freed at
        # once, not when the garbage collector finds it.
        self._token_bytes = TokenBytes(tokenizer, frozenset(self._added), tokens.texts, file.decoder)
        self._table = TokenTable(self._token_bytes, tokens)
        self._encode_all = partial(encode_all, tokenizer, vet)
        pattern = ascii_pattern(file)
        spellings = TokenSpellings(token.content for token in file.added_tokens)
        self.words = None
        if pattern is not None:
            self.words = WordCache(pattern, spellings, self._encode_all, breaks_at_spaces=breaks_at_spaces(file))

    @classmethod
    def load(cls, path: Path, vet: Vet | None = None) -> HuggingFaceTokenizer:
        file = tokenizer_file(path)
        return cls.from_text(read_text(file), special=read_special_tokens(file.parent), where=str(file), vet=vet)

    @classmethod
    def from_text(
        cls,
        text: str,
        *,
        special: SpecialTokens = SpecialTokens(),
        where: str = "the tokenizer",
        vet: Vet | None = None,
    ) -> HuggingFaceTokenizer:
        try:
            file = _decoder.decode(text)
            tokenizer = HfTokenizer.from_str(text)
            if isinstance(tokenizer.model, BPE):
                tokenizer.model = _bpe_decoder.decode(text).model.without_cache()
        except Exception as error:  # the library raises plain Exception
            raise InvalidRequest(
                f"{where} is not a valid tokenizer.json: {error}. Download it again from the source model's repository",
                code="tokenizer_broken",
            ) from error
        return cls(tokenizer, file, special, vet)

    @cached_property
    def spans_words(self) -> bool:
        """See `slices.py`."""
        added = any(token.lstrip or token.rstrip or token.single_word for token in self._added.values())
        return added or slices.spans_words(self._tokenizer.get_vocab())

    @cached_property
    def wrapping(self) -> tuple[list[int], list[int]]:
        """What the file's post-processor adds around a text."""
        whole, probe = self._tokenizer.encode("a", add_special_tokens=True).ids, self._encode("a")
        at = next((at for at in range(len(whole)) if whole[at : at + len(probe)] == probe), 0)
        return whole[:at], whole[at + len(probe) :]

    @cached_property
    def fim(self) -> FimTokens | None:
        def find(*texts: str) -> int | None:
            return next((self.specials[text] for text in texts if text in self.specials), None)

        prefix, suffix, middle = find(*_FIM_PREFIXES), find(*_FIM_SUFFIXES), find(*_FIM_MIDDLES)
        if prefix is None or suffix is None or middle is None:
            return None
        return FimTokens(prefix, suffix, middle, find(*_FIM_REPOSITORIES), find(*_FIM_FILES))

    def encode_pair(self, first: str, second: str) -> list[int]:
        first, second = well_formed(first), well_formed(second)
        if self._vet is not None:
            self._vet(first, False)
            self._vet(second, False)
        return list(self._tokenizer.encode(first, second, add_special_tokens=True).ids)

    @property
    def template(self) -> str | None:
        """A folder's template is a separate file: `prompt/template_source.py` reads it."""
        return None

    def named_template(self, name: str | None) -> str | None:  # noqa: ARG002 - as `template`
        return None

    def _bos(self, special: SpecialTokens) -> int | None:
        id = self._tokenizer.token_to_id(special.bos_token) if special.bos_token else None
        if special.adds_bos is not None:
            return id if special.adds_bos else None
        begun = self._tokenizer.encode("", add_special_tokens=True).ids
        return begun[0] if begun and id in (None, begun[0]) and begun[0] in self._added else None

    def _eos(self, special: SpecialTokens) -> frozenset[int]:
        texts = (special.eos_token, *(text for text in _TURN_ENDS if text in self.specials and self._ends_a_turn(text)))
        found = {self._tokenizer.token_to_id(text) for text in texts if text}
        return frozenset(id for id in found | set(special.eos_ids) if id is not None)

    def _ends_a_turn(self, text: str) -> bool:
        """With channels (harmony), `<|end|>` ends one of several messages in a turn."""
        return text != "<|end|>" or "<|channel|>" not in self.specials

    def encode(self, text: str) -> list[int]:
        if self.words is not None and (ids := self.words.encode(text)) is not None:
            return ids
        try:
            return self._encode(text)
        except (TypeError, UnicodeEncodeError):
            return self._encode(well_formed(text))

    def _encode(self, text: str) -> list[int]:
        """As a batch of one: the library's `encode` holds the GIL while it works."""
        return self._encode_all([text])[0]

    def encode_plain(self, text: str) -> list[int]:
        return self._plain.encode(well_formed(text))

    def encode_plain_inside(self, text: str) -> list[int]:
        return self._plain.encode(well_formed(text), start=False)

    def decode(self, ids: Sequence[int], *, specials: bool = True) -> str:
        if not specials:
            ids = [id for id in ids if id not in self._tokens.texts]
        if self._family == "byte_level":  # the library's decoder does not read added tokens such as "ö"
            return b"".join(map(self._token_bytes, ids)).decode("utf-8", "replace")
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """Empty for an id without a token: models have more rows than their vocabularies."""
        return self._token_bytes(token)

    def detokenizer(self) -> Detokenizer:
        if self._family == "other":
            return PrefixDetokenizer(self.decode, self._tokens)
        return TableDetokenizer(self._table)
