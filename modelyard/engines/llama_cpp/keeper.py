"""Keeps the KV of an engine's caches over its end: saved to files when it closes, restored when it opens.

Taking KV out of a context and putting it in belongs to the engine's thread; files are read and written anywhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from modelyard.core.engine import EngineSpec
from modelyard.engines.llama_cpp.adapters import Wardrobe
from modelyard.engines.llama_cpp.context import Cache
from modelyard.engines.llama_cpp.identity import identity
from modelyard.engines.llama_cpp.image import Image, Origin
from modelyard.engines.llama_cpp.options import Options
from modelyard.engines.llama_cpp.release import RELEASE
from modelyard.engines.llama_cpp.saved import Store
from modelyard.engines.llama_cpp.sequences import Slot
from modelyard.engines.llama_cpp.state import layout
from modelyard.library.cache_dir import cache_dir
from modelyard.library.model_files import split_parts

log = logging.getLogger(__name__)

Order = Callable[[Callable[[], None]], Awaitable[None]]  # has something done on the engine's thread

_POSITIONS = (
    "rope_scaling",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)


def folder_of(options: Options) -> Path | None:
    if isinstance(options.kv_store, str):
        return Path(options.kv_store).expanduser()
    return cache_dir() / "kv" if options.kv_store else None


def keeper_for(spec: EngineSpec, file: Path, wardrobe: Wardrobe) -> Keeper | None:
    """None where nothing is to be saved."""
    folder = folder_of(spec.options)
    return Keeper(folder, spec, file, wardrobe) if folder is not None else None


class Keeper:
    def __init__(self, folder: Path, spec: EngineSpec, file: Path, wardrobe: Wardrobe) -> None:
        options: Options = spec.options
        self._store = Store(folder, spec.model, options.kv_store_mb << 20)
        self._wardrobe = wardrobe
        model = identity(split_parts(file))
        told = {name: getattr(options, name) for name in _POSITIONS}
        positions = {name: value for name, value in told.items() if value is not None}
        self._origins = {
            name: Origin(RELEASE, model, name, info.window, layout(info, options), positions)
            for name, info in spec.caches.items()
        }

    # --- at the ends of an engine's life ----------------------------------------------------------------------------

    def save_all(self, caches: Iterable[Cache]) -> None:
        for cache in caches:
            for slot in _oldest_first(cache):
                image = self._take(cache, slot)
                file = self._write(cache, image) if image is not None else None
                if image is not None and file is not None:
                    self._note(cache, slot, image, file)

    def restore_all(self, caches: Iterable[Cache], go_on: Callable[[], bool]) -> None:
        for cache in caches:
            for file in self._store.files(cache.name):
                if not go_on() or cache.places.empty is None:
                    break
                self._adopt(cache, str(file), self._read(cache, file))

    # --- while it runs ----------------------------------------------------------------------------------------------

    async def save(self, cache: Cache, order: Order) -> None:
        """Streams go on between two sequences, and while a file is written."""
        for slot in _oldest_first(cache):
            taken: list[Image | None] = []
            await order(lambda slot=slot, taken=taken: taken.append(self._take(cache, slot)))  # type: ignore[misc]
            file = await asyncio.to_thread(self._write, cache, taken[0]) if taken[0] is not None else None
            if taken[0] is not None and file is not None:
                await order(partial(self._note, cache, slot, taken[0], file))

    async def restore(self, cache: Cache, order: Order) -> None:
        """Into sequences that are empty: nobody's KV goes for it."""
        for file in await asyncio.to_thread(self._store.files, cache.name):
            if cache.places.empty is None:
                break
            image = await asyncio.to_thread(self._read, cache, file)
            await order(partial(self._adopt, cache, str(file), image))

    # --- one by one -------------------------------------------------------------------------------------------------

    def _take(self, cache: Cache, slot: Slot) -> Image | None:
        """None where its file holds all of it; then that becomes the newest."""
        if slot.file is not None and slot.saved == len(slot.tokens) and self._store.touch(slot.file):
            return None
        image = cache.places.image(slot)
        return None if image is None else replace(image, worn=self._wardrobe.worn(image.adapters))

    def _write(self, cache: Cache, image: Image) -> str | None:
        file = self._store.write(self._origins[cache.name], image)
        if file is not None:
            log.info("saved KV of %d tokens of the cache %r: %d MiB", len(image.tokens), cache.name, image.size >> 20)
        return file

    def _note(self, cache: Cache, slot: Slot, image: Image, file: str) -> None:
        self._store.drop(cache.places.note(slot, image, file))

    def _read(self, cache: Cache, file: Path) -> Image | None:
        return self._store.read(file, self._origins[cache.name], self._wardrobe.worn)

    def _adopt(self, cache: Cache, file: str, image: Image | None) -> None:
        if image is None or self._wardrobe.worn(image.adapters) != image.worn:  # gone since it was read
            return
        if cache.places.adopt(image, file):
            log.info("restored KV of %d tokens of the cache %r", len(image.tokens), cache.name)
        else:
            log.info("the saved KV in %s is not needed, or finds no place in the cache %r", file, cache.name)


def _oldest_first(cache: Cache) -> list[Slot]:
    """What was used last is to be the newest file."""
    return sorted(cache.slots, key=lambda slot: slot.used)
