"""Images and audio of a prompt: libmtmd cuts them into chunks, encodes the chunks, and the context reads the vectors.

    Projector.read     bytes ─→ chunks, each with its ids (`media_tokens.py`) and positions; before a job is admitted
    MediaEncoder       chunk ─→ vectors, on a thread of its own: streams go on while a picture is encoded

A chunk whose KV is in the cache is neither encoded nor read again. Vectors are kept for a while, too: the same picture
may come with another text before it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from modelyard import libmtmd
from modelyard.core.engine import Media, TokenRun
from modelyard.core.errors import Internal, InvalidRequest, Unavailable, Unsupported
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.kv_snapshot import file_identity
from modelyard.engines.llama_cpp.media_decoding import decoded_audio, decoded_image
from modelyard.engines.llama_cpp.media_tokens import IntArray, count_positions, media_ids
from modelyard.engines.llama_cpp.options import Options
from modelyard.library import variants
from modelyard.library.model_files import locate_model_file
from modelyard.tokenizer import llama_log

Vectors = npt.NDArray[np.float32]


class MediaChunk(Struct, frozen=True, eq=False):
    """Part of a picture or sound that is encoded at once. `start` is its first token in the prompt. `positions` has a
    column for each token: one number, four under M-RoPE. `n_positions` is by how much the next token's is further."""

    start: int
    tokens: int
    n_positions: int
    key: bytes
    positions: IntArray
    is_causal: bool
    handle: int  # mtmd_input_chunk
    owner: ChunkList  # frees the handle

    @property
    def end(self) -> int:
        return self.start + self.tokens


class MediaPrompt(Struct, frozen=True, eq=False):
    """A whole prompt: text and media."""

    ids: IntArray
    chunks: list[MediaChunk]


class ChunkList:
    """libmtmd's list of the chunks of one picture or sound."""

    def __init__(self, mtmd: libmtmd.LibMtmd) -> None:
        self._mtmd, self.raw = mtmd, mtmd.mtmd_input_chunks_init()
        weakref.finalize(self, mtmd.mtmd_input_chunks_free, self.raw)

    def __iter__(self) -> Any:
        return (self._mtmd.mtmd_input_chunks_get(self.raw, at) for at in range(len(self)))

    def __len__(self) -> int:
        return int(self._mtmd.mtmd_input_chunks_size(self.raw))


class Bitmap:
    """libmtmd's copy of decoded pixels or samples."""

    def __init__(self, mtmd: libmtmd.LibMtmd, raw: int) -> None:
        self.raw = raw
        weakref.finalize(self, mtmd.mtmd_bitmap_free, raw)


class Projector:
    """The encoder of images and audio that belongs to a model. `read` and `count` may be called by any thread."""

    def __init__(self, path: Path, model: Any, options: Options, threads: int, *, gpu: bool) -> None:
        self._mtmd = mtmd = libmtmd.load()
        self._lock = Lock()
        mtmd.mtmd_log_set(llama_log.callback, None)
        mtmd.mtmd_helper_log_set(llama_log.callback, None)
        params = mtmd.mtmd_context_params_default()
        params.use_gpu, params.n_threads, params.warmup, params.print_timings = gpu, threads, False, False
        params.image_min_tokens = options.image_min_tokens or params.image_min_tokens
        params.image_max_tokens = options.image_max_tokens or params.image_max_tokens
        llama_log.clear()
        self._raw = mtmd.mtmd_init_from_file(str(path).encode(), model, params)
        if not self._raw:
            raise InvalidRequest(f"{path} cannot be loaded: {llama_log.first_error()}", code="projector_unreadable")
        self.width = int(lib.llama_model_n_embd_inp(model))
        self.uses_mrope = bool(mtmd.mtmd_decode_use_mrope(self._raw))
        limits = f"{options.image_min_tokens} {options.image_max_tokens}"
        self._identity = f"{file_identity([path])} {limits}".encode()
        supports = {"image": mtmd.mtmd_support_vision, "audio": mtmd.mtmd_support_audio}
        self.kinds = tuple(kind for kind, function in supports.items() if function(self._raw))
        self._rate = int(mtmd.mtmd_get_audio_sample_rate(self._raw))  # samples per second; -1: it takes no sounds

    def close(self) -> None:
        with self._lock:
            raw, self._raw = self._raw, None
        if raw is not None:
            self._mtmd.mtmd_free(raw)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """While another thread reads, it is not closed."""
        with self._lock:
            if self._raw is None:
                raise Unavailable("the engine was closed")
            yield

    # --- chunks -------------------------------------------------------------------------------------------------------

    def read(self, parts: Iterable[TokenRun | Media]) -> MediaPrompt:
        pieces: list[IntArray] = []
        chunks: list[MediaChunk] = []
        tokens = position = 0
        for part in parts:
            bitmap = self._bitmap(part) if isinstance(part, Media) else None
            with self._opened():
                for piece in self._pieces(part, bitmap):
                    if isinstance(piece, EncodedPiece):
                        chunks.append(self._chunk(piece, tokens, position))
                        ids = media_ids(piece.key, piece.tokens, piece.positions)
                    else:
                        ids = piece
                    pieces.append(ids)
                    tokens, position = tokens + len(ids), position + count_positions(ids)
        return MediaPrompt(np.concatenate(pieces), chunks)

    def count(self, media: Media) -> int:
        """The tokens that it takes, with the marks around it."""
        bitmap = self._bitmap(media)
        with self._opened():
            return sum(len(piece) for piece in self._pieces(media, bitmap))

    def _pieces(self, part: TokenRun | Media, bitmap: Bitmap | None) -> Iterator[IntArray | EncodedPiece]:
        """Text ids, and what has to be encoded: a picture has marks around it, and between its tiles."""
        if isinstance(part, TokenRun) or bitmap is None:
            yield np.asarray(part.ids if isinstance(part, TokenRun) else (), np.int32)
            return
        owner, mtmd = self._tokenize(part, bitmap), self._mtmd
        for number, handle in enumerate(owner):
            tokens = int(mtmd.mtmd_input_chunk_get_n_tokens(handle))
            if mtmd.mtmd_input_chunk_get_type(handle) == libmtmd.TEXT_CHUNK:
                ids = mtmd.mtmd_input_chunk_get_tokens_text(handle, ctypes.byref(ctypes.c_size_t()))
                yield np.array(ids[:tokens], np.int32)
            else:
                positions = int(mtmd.mtmd_input_chunk_get_n_pos(handle))
                key = b"%b %b %d" % (self._identity, part.sha256.encode(), number)
                yield EncodedPiece(handle, owner, key, tokens, positions)

    def _chunk(self, piece: EncodedPiece, start: int, position: int) -> MediaChunk:
        positions = self._positions(piece, position)
        is_causal = not self._mtmd.mtmd_decode_use_non_causal(self._raw, piece.handle)
        return MediaChunk(
            start, piece.tokens, piece.positions, piece.key, positions, is_causal, piece.handle, piece.owner
        )

    def _positions(self, piece: EncodedPiece, first: int) -> IntArray:
        count, mtmd = piece.tokens, self._mtmd
        image = mtmd.mtmd_input_chunk_get_tokens_image(piece.handle)
        if not self.uses_mrope or not image:
            line = np.arange(first, first + count, dtype=np.int32)
            return np.tile(line, (4 if self.uses_mrope else 1, 1))
        places = (mtmd.mtmd_decoder_pos * count)()
        mtmd.mtmd_helper_image_get_decoder_pos(image, first, places)
        t, x, y, z = np.frombuffer(bytes(places), np.int32).reshape(count, 4).T
        return np.ascontiguousarray([t, y, x, z])

    def _tokenize(self, media: Media, bitmap: Bitmap) -> ChunkList:
        mtmd = self._mtmd
        chunks, part = ChunkList(mtmd), mtmd.mtmd_input_part(None, bitmap.raw)
        parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
        llama_log.clear()
        if mtmd.mtmd_tokenize_from_parts(self._raw, chunks.raw, parts, 1, False):
            raise _unreadable(media, llama_log.first_error())
        return chunks

    def _bitmap(self, media: Media) -> Bitmap:
        """The decoded picture or sound. Others read meanwhile: a large one takes seconds."""
        if media.kind not in self.kinds:
            raise Unsupported(f"this model takes no {_PLURALS[media.kind]}", code="modality_unsupported")
        if media.kind == "image":
            return Bitmap(self._mtmd, self._mtmd.mtmd_bitmap_init(*decoded_image(media.data)))
        samples = decoded_audio(media.data, self._rate)
        return Bitmap(self._mtmd, self._mtmd.mtmd_bitmap_init_from_audio(len(samples) // 4, samples))

    # --- vectors ------------------------------------------------------------------------------------------------------

    def encode(self, chunk: MediaChunk) -> Vectors:
        """One thread at a time: libmtmd has one buffer for the result."""
        llama_log.clear()
        if self._mtmd.mtmd_encode_chunk(self._raw, chunk.handle):
            raise Internal(f"an image or sound could not be encoded: {llama_log.first_error()}")
        found = np.ctypeslib.as_array(self._mtmd.mtmd_get_output_embd(self._raw), (chunk.tokens, self.width))
        return np.array(found, np.float32)


class EncodedPiece(Struct, frozen=True, eq=False):
    """What `MediaChunk` is made of, before its place in the prompt is known."""

    handle: int
    owner: ChunkList
    key: bytes
    tokens: int
    positions: int

    def __len__(self) -> int:
        return self.tokens


_PLURALS = {"image": "images", "audio": "audio"}


def _unreadable(media: Media, reason: str) -> InvalidRequest:
    name = {"image": "an image", "audio": "an audio part"}[media.kind]
    return InvalidRequest(f"{name} cannot be read: {reason}", code=f"invalid_{media.kind}", param="messages")


# --- the encoder's thread ---------------------------------------------------------------------------------------------


class MediaEncoder:
    """Encodes one chunk after the other on its own thread. The engine's thread asks, and goes on with other jobs.

    `limit` is the size in bytes of the vectors that are kept.
    """

    def __init__(self, projector: Projector, limit: int, wake: Callable[[], None]) -> None:
        self._projector, self._limit, self._wake = projector, limit, wake
        self._thread = ThreadPoolExecutor(1, "media-encoder")
        self._kept: OrderedDict[bytes, Vectors] = OrderedDict()
        self._size = 0
        self._lock = Lock()
        self.encoded = 0  # chunks, since the engine was opened

    def request(self, chunk: MediaChunk) -> Future[Vectors]:
        """Its vectors; `wake` is called when they are there."""
        with self._lock:
            kept = self._kept.get(chunk.key)
            if kept is not None:
                self._kept.move_to_end(chunk.key)
        if kept is not None:
            done: Future[Vectors] = Future()
            done.set_result(kept)
            return done
        future = self._thread.submit(self._encode, chunk)
        future.add_done_callback(lambda _: self._wake())
        return future

    def _encode(self, chunk: MediaChunk) -> Vectors:
        with self._lock:
            if (kept := self._kept.get(chunk.key)) is not None:  # another job asked for it, too
                return kept
        vectors = self._projector.encode(chunk)
        self.encoded += 1
        with self._lock:
            self._kept[chunk.key] = vectors
            self._size += vectors.nbytes
            while self._size > self._limit and self._kept:
                self._size -= self._kept.popitem(last=False)[1].nbytes
        return vectors

    def close(self) -> None:
        """Waits for the chunk that is being encoded."""
        self._thread.shutdown(cancel_futures=True)
        self._kept.clear()


# --- without a loaded model -------------------------------------------------------------------------------------------


def count_without_model(options: Options, media: Sequence[Media]) -> list[int]:
    """The tokens of each. Loads the projector for the call, and a model without weights: libmtmd asks it for its
    vocabulary and its positions."""
    path = locate_model_file(options.path)
    file = variants.locate_projector(options.mmproj, path)
    if file is None:
        raise Unsupported("this model takes text only", code="modality_unsupported")
    limits = options.image_min_tokens, options.image_max_tokens
    keys = [(str(file), file.stat().st_mtime_ns, *limits, each.sha256) for each in media]
    counts = {key: _counted[key] for key in keys if key in _counted}
    fresh = {key: each for key, each in zip(keys, media, strict=True) if key not in counts}
    if fresh:
        counts |= zip(fresh, _count_fresh(options, path, file, list(fresh.values())), strict=True)
        if len(_counted) > _MAX_COUNTED:
            _counted.clear()
        _counted.update(counts)
    return [counts[key] for key in keys]


_counted: dict[tuple[Any, ...], int] = {}  # agents count a conversation with the same images at every turn
_MAX_COUNTED = 10_000


def _count_fresh(options: Options, path: Path, file: Path, media: Sequence[Media]) -> list[int]:
    params = lib.llama_model_default_params()
    params.n_gpu_layers, params.no_alloc, params.load_mode = 0, True, 0
    llama_log.clear()
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise InvalidRequest(f"{path} cannot be loaded: {llama_log.first_error()}", code="model_unreadable")
    try:
        projector = Projector(file, model, options, 1, gpu=False)
        try:
            return [projector.count(each) for each in media]
        finally:
            projector.close()
    finally:
        lib.llama_model_free(model)
