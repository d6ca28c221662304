"""What fills a machine's memory, as bars of named pieces: models by weights and caches, everything else, free. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from modelyard.workbench.client import Json
from modelyard.workbench.look import SERIES

OTHER, FREE = "#9aa5b4", "transparent"


class Piece(Struct, frozen=True):
    name: str
    bytes: int
    colour: str
    opacity: float = 1.0


class Bar(Struct, frozen=True):
    name: str
    total: int
    pieces: tuple[Piece, ...]

    @property
    def free(self) -> int:
        return self.total - sum(piece.bytes for piece in self.pieces)


def bars(memory: Json, models: list[Json]) -> list[Bar]:
    """`models` are the records of all models. Pieces of GPUs are known per model, not per GPU, where there are several:
    there each GPU gets its share of them by what it has in use."""
    colours = {record["id"]: SERIES[place % len(SERIES)] for place, record in enumerate(models)}
    ram, gpus = memory["ram"], memory["gpus"]
    here = [piece for record in models for piece in _pieces(record, "cpu", colours[record["id"]])]
    made = [_bar("RAM", ram["total"], ram["total"] - ram["free"], here)]
    there = [piece for record in models for piece in _pieces(record, "gpu", colours[record["id"]])]
    used = sum(gpu["used"] for gpu in gpus) or 1
    for gpu in gpus:
        share = [_scaled(piece, gpu["used"] / used) for piece in there]
        made.append(_bar(gpu["name"], gpu["total"], gpu["used"], share))
    return made


def _bar(name: str, total: int, used: int, ours: list[Piece]) -> Bar:
    """Estimates may say more than is really in use (pages not touched yet): then they are shown as they are."""
    other = max(0, used - sum(piece.bytes for piece in ours))
    return Bar(name, total, (*ours, Piece("everything else", other, OTHER)))


def _scaled(piece: Piece, share: float) -> Piece:
    return Piece(piece.name, int(piece.bytes * share), piece.colour, piece.opacity)


def _pieces(record: Json, device: str, colour: str) -> Iterator[Piece]:
    estimate, name = record["memory"]["estimate"], record["id"]
    up = sum(one["state"] in ("ready", "draining") for one in record["replicas"]["items"])
    if estimate is None or not up or (estimate["device"] == "cpu") != (device == "cpu"):
        return
    yield Piece(f"{name} weights", estimate["weights"] * up, colour)
    for cache, size in _split(record, estimate["kv"] * up):
        yield Piece(f"{name} KV {cache}", size, colour, 0.65)
    if estimate["compute"]:
        yield Piece(f"{name} compute", estimate["compute"] * up, colour, 0.35)


def _split(record: Json, kv: int) -> Iterator[tuple[str, int]]:
    """A cache's part of the KV is its share of the tokens."""
    tokens = {name: cache["window"] * cache["parallel"] for name, cache in record["caches"].items()}
    whole = sum(tokens.values()) or 1
    for name, count in tokens.items():
        yield name, int(kv * count / whole)
