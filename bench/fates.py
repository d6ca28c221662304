"""Clients of a server whose parts die: what becomes of each request, and how long after a fault it knows."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence

import httpx

PORTS = (21_081, 21_082)
LONGEST_S = 5.0  # after a fault, for everybody to have an answer or an error


class Fates:
    """`worst` is the longest that anybody waited after a fault."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[float] = []
        self.worst = 0.0
        self.words: Counter[str] = Counter()  # of the errors, and whether it was late
        self.over = asyncio.Event()

    def bad(self, allowed: Sequence[str]) -> dict[str, int]:
        good = ("whole", "error", *allowed)
        return {fate: count for fate, count in self.counts.items() if fate not in good}

    def came(self, fate: str, began: float, ended: float, words: str = "") -> None:
        hit = [at for at in self.faults if began <= at <= ended]
        waited = ended - hit[0] if hit else 0.0
        self.worst = max(self.worst, waited)
        late = ", late" if waited > LONGEST_S else ""
        self.counts[fate + late] += 1
        if words:
            self.words[f"{words[:160]}{late}"] += 1


async def client(number: int, fates: Fates) -> None:
    async with httpx.AsyncClient(timeout=httpx.Timeout(30, connect=5)) as http:
        turn = 0
        while not fates.over.is_set():
            turn += 1
            text = f"client {number} turn {turn}: " + " ".join(str(number * 1000 + i) for i in range(60))
            began = time.monotonic()
            fate, words = await one(http, PORTS[turn % 2], text)
            fates.came(fate, began, time.monotonic(), words)
            if fate in ("refused", "error"):
                await asyncio.sleep(0.1)


async def one(http: httpx.AsyncClient, port: int, text: str) -> tuple[str, str]:
    """whole · error (in words) · refused (nobody listens) · cut (the gateway died) · MIXED · SILENT; and the words"""
    body = {"model": "x", "stream": True, "max_tokens": 2000, "messages": [{"role": "user", "content": text}]}
    said, done, error = "", False, ""
    try:
        async with http.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return ("error", answer.text) if "error" in answer.text else ("SILENT", answer.text)
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    frame = json.loads(line[6:])
                    error = error or (line if "error" in frame else "")
                    said += "".join(choice["delta"].get("content") or "" for choice in frame.get("choices", []))
    except (httpx.ConnectError, httpx.ConnectTimeout):
        return "refused", ""
    except httpx.ReadTimeout:
        return "SILENT", said
    except httpx.HTTPError:
        return ("MIXED", said) if not text.startswith(said) else ("cut", "")
    if not text.startswith(said.strip()):
        return "MIXED", said
    if error:
        return "error", error
    return ("whole", "") if done and said.strip() == text else ("SILENT", said)
