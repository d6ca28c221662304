"""One measurement: the load generator against a server, what that cost the server, and how busy others were."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping

import msgspec
import psutil
from msgspec import Struct

from bench.load import Job, Outcome
from bench.servers import ROOT, Server
from bench.stats import Repeated

_LIMIT_S = 180.0


class Sample(Struct, frozen=True):
    """`others` is how many cores were busy with neither the server nor the load generator."""

    outcome: Outcome
    cpu_s: float
    rss_mb: float
    others: float

    @property
    def answers_per_cpu_s(self) -> float:
        return self.outcome.answers / self.cpu_s

    @property
    def events_per_cpu_s(self) -> float:
        return self.outcome.events / self.cpu_s

    @property
    def events_per_s(self) -> float:
        return self.outcome.events / self.outcome.seconds

    @property
    def answers_per_s(self) -> float:
        return self.outcome.answers / self.outcome.seconds


def load(job: Job) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-m", "bench.load"], input=msgspec.json.encode(job), capture_output=True, cwd=ROOT,
        timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the load generator failed:\n{done.stderr.decode(errors='replace')[-3000:]}")
    return msgspec.json.decode(done.stdout, type=Outcome)


def sample(server: Server, job: Job) -> Sample:
    before, machine, ours = server.cpu_s(), _busy_s(), _own_s()
    outcome = load(job)
    cpu_s = server.cpu_s() - before
    others = max(0.0, _busy_s() - machine - cpu_s - (_own_s() - ours)) / outcome.seconds
    return Sample(outcome, max(cpu_s, 1 / os.sysconf("SC_CLK_TCK")), server.rss_mb(), others)


def _busy_s() -> float:
    """Seconds that the machine's cores were at work for anybody."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0)
    return float(sum(times) - idle)


def _own_s() -> float:
    """This process and the load generators that have ended."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, who))


class Samples(Struct, frozen=True):
    """The same measurement in several rounds."""

    rounds: tuple[Sample, ...]

    def of(self, what: Callable[[Sample], float]) -> Repeated:
        return Repeated(tuple(what(sample) for sample in self.rounds))

    @property
    def errors(self) -> int:
        return sum(sample.outcome.errors for sample in self.rounds)


def interleaved(
    servers: Mapping[str, Server], job: Callable[[Server], Job], rounds: int, tick: Callable[[str], None]
) -> dict[str, Samples]:
    """Every server in every round, so that what disturbs the machine for a while disturbs them all."""
    found: dict[str, list[Sample]] = {name: [] for name in servers}
    for _ in range(rounds):
        for name, server in servers.items():
            tick(name)
            found[name].append(sample(server, job(server)))
    return {name: Samples(tuple(samples)) for name, samples in found.items()}
