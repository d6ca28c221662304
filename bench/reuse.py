"""How much of an agent's prompts is read again: real coding agents on the real engine, whose answers are scripted.

    python -m bench.reuse [--only NAME] [--template NAME] [--skip-llama-server] [--json FILE]

Each session of `bench/sittings.py` is run by the agent itself (`setup/clients.py` installs it) against our server. Of
the tokens that a session's cache held after one turn, those that the next turn evaluates again are counted; the last
answer's tokens are among them. The requests are recorded and sent to a llama-server with the same model, template,
window and number of slots, which counts for itself. The model has one layer (`bench/shallow.py`): counts do not depend
on it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from bench.recorded import Failed, Recorded, replayed
from bench.shallow import shallow_model
from bench.sittings import SITTINGS, Sitting, furnish
from modelyard.telemetry.history import RequestRecord
from tests.clients.bench import Bench, Done
from tests.serving import Served, serving

WINDOW, SLOTS = 65536, 3
TARGET = 0.02
_FIRST = ("new_session", "other_session")  # a conversation begins: a title, say, is asked for under the same name


class Turn(Struct, frozen=True):
    """One request of a session, as its server counted it. `cached` of the `prompt` tokens were reused."""

    session: str
    prompt: int
    cached: int
    output: int = 0
    cause: str = ""

    @property
    def evaluated(self) -> int:
        return self.prompt - self.cached

    @property
    def held(self) -> int:
        """What the cache had of it in the end."""
        return self.prompt + self.output


class Tally(Struct, frozen=True):
    """Of all turns but each conversation's first: `known` tokens were there before, `again` of them were evaluated once
    more; `evaluated` counts the new ones, too."""

    requests: int
    known: int
    again: int
    evaluated: int

    @property
    def share(self) -> float:
        return self.again / self.known if self.known else 0.0


def _predecessor(last: Sequence[Turn], turn: Turn) -> Turn | None:
    """A session's conversations only grow, and its side requests are small: the longest that can have come before."""
    return max(last, key=lambda one: (one.prompt <= turn.prompt, one.held), default=None)


def tally(turns: Sequence[Turn]) -> Tally:
    talks: dict[str, list[Turn]] = {}  # the last turn of each conversation of a session
    known = again = evaluated = 0
    for turn in turns:
        last = talks.setdefault(turn.session, [])
        before = None if turn.cause in _FIRST else _predecessor(last, turn)
        if before is not None:
            there = min(before.held, turn.prompt)
            known += there
            again += max(0, there - turn.cached)
            evaluated += turn.evaluated
            last.remove(before)
        last.append(turn)
    return Tally(len(turns), known, again, evaluated)


class Found(Struct, frozen=True):
    name: str
    ours: tuple[Turn, ...]
    theirs: tuple[Turn, ...]


def run(sitting: Sitting, template: str, llama_server: bool) -> Found:
    with tempfile.TemporaryDirectory(prefix="modelyard-reuse-") as folder:
        bench = Bench(sitting.agent, Path(folder))
        furnish(bench.work)
        script = Path(folder) / "replay.jsonl"
        script.write_text("".join(json.dumps(rule) + "\n" for rule in sitting.rules(bench.work)))
        with serving(configuration(script, template)) as served:
            bench.talk_to(served)
            _drive(bench, sitting)
            records = sorted(served.yard.gateway.history.recent(1000), key=lambda one: one.at)
            recorded = [_recorded(served, one) for one in records]
    ours = tuple(map(_turn, records))
    counted = _elsewhere(recorded, template) if llama_server else []
    theirs = tuple(Turn(one.session, *pair, cause=one.cause) for one, pair in zip(ours, counted, strict=False))
    return Found(sitting.name, ours, theirs)


def _elsewhere(recorded: Sequence[Recorded], template: str) -> list[tuple[int, int]]:
    """Nothing where llama-server does not take what the agent sends."""
    try:
        return replayed(recorded, shallow_model(), template, WINDOW, SLOTS)
    except Failed as error:
        print(error, file=sys.stderr)
        return []


def _drive(bench: Bench, sitting: Sitting) -> None:
    session = ""
    for own in sitting.runs:
        done = bench.run(*(word.replace("{session}", session) for word in own), **sitting.env)
        if done.code != 0:
            raise Failed(f"the agent ended badly: {done!r}")
        session = session or _session(done)


def _session(done: Done) -> str:
    """Claude Code tells it in its last line."""
    try:
        return str(json.loads(done.out.strip().splitlines()[-1])["session_id"])
    except (ValueError, LookupError, TypeError):
        return ""


def configuration(script: Path, template: str) -> dict[str, Any]:
    real = {
        "backend": "llama_cpp",
        "path": str(shallow_model()),
        "n_threads": 1,
        "speculation": "off",
        "prompt_format": template,
        "replay": str(script),
    }
    return {
        "models": {"real": real},
        "caches": {"main": {"model": "real", "n_ctx": WINDOW, "parallel": SLOTS}},
        "routes": [{"match": "*", "cache": "main"}],
        "log": {"history_texts": True},
    }


def _turn(record: RequestRecord) -> Turn:
    cause = record.reuse.cause if record.reuse is not None else ""
    return Turn(record.session or "", record.usage.prompt, record.usage.cached, record.usage.output, cause)


def _recorded(served: Served, record: RequestRecord) -> Recorded:
    told = httpx.get(f"{served.url}/v1/admin/requests/req_{record.trace}", timeout=60, trust_env=False).json()
    return Recorded(record.endpoint, told["texts"]["request"])


# --- what is shown ----------------------------------------------------------------------------------------------------


def table(found: Iterable[Found]) -> Table:
    shown = Table("session", "requests", "known", "again", "share", "llama-server", "ratio", box=None)
    for one in found:
        ours, theirs = tally(one.ours), tally(one.theirs)
        beside = (f"{theirs.share:.1%}", f"{ratio(one):.2f}") if one.theirs else ("", "")
        shown.add_row(one.name, str(ours.requests), f"{ours.known:,}", f"{ours.again:,}", f"{ours.share:.2%}", *beside)
    return shown


def ratio(found: Found) -> float:
    """Of the tokens evaluated in all turns but the first. What we generated is in our cache and was never in theirs:
    it is taken off."""
    ours, theirs = tally(found.ours), tally(found.theirs)
    generated = tally([msgspec.structs.replace(turn, cached=0) for turn in found.ours]).known
    generated -= tally([msgspec.structs.replace(turn, cached=0, output=0) for turn in found.ours]).known
    return ours.evaluated / max(1, theirs.evaluated - generated)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end, too
    options, console = _options(), Console()
    console.width = max(console.width, 120)
    chosen = [one for one in SITTINGS if options.only is None or options.only.lower() in one.name.lower()]
    found: list[Found] = []
    for sitting in chosen:
        try:
            found.append(run(sitting, options.template, not options.skip_llama_server))
        except (Failed, AssertionError) as error:  # the bench asserts that an agent is installed, and that it ends
            console.print(f"{sitting.name}: {error}", markup=False, soft_wrap=True)
            continue
        console.print(table(found[-1:]))
        if options.json is not None:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
        for turn in found[-1].ours if options.verbose else ():
            console.print(f"  {turn}", markup=False, soft_wrap=True)
    console.print(table(found))
    if len(found) < len(chosen) or any(tally(one.ours).share > TARGET for one in found):
        raise SystemExit(f"a session failed, or more than {TARGET:.0%} was evaluated again")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How much of an agent's prompts is read again.")
    parser.add_argument("--only", help="sessions whose name has this in it")
    parser.add_argument("--template", default="generic", help="a built-in chat template; both servers use it")
    parser.add_argument("--skip-llama-server", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="every turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every turn in this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
