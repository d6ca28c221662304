"""Settings of engines in other processes and on other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from modelyard.workers.ray import ActorResources, RayCluster
from modelyard.workers.transport import ClusterKeys, HeartbeatConfig, read_keys


class RayResources(BaseModel):
    model_config = ConfigDict(extra="forbid")

    num_cpus: float = Field(default=1.0, ge=0, description="CPUs.")
    num_gpus: float = Field(default=0.0, ge=0, description="GPUs, or a share of one.")
    memory: int | None = Field(default=None, gt=0, description="Bytes of RAM.")
    custom: dict[str, float] = Field(default_factory=dict, description="Resources of your own names.")

    def resources(self) -> ActorResources:
        return ActorResources(self.num_cpus, self.num_gpus, self.memory, self.custom)


class WorkerSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: Path | None = Field(
        default=None,
        description="File of the cluster's keys, made with modelyard keys; needed where an address can be reached from "
        "other machines.",
    )
    host: str | None = Field(
        default=None,
        min_length=1,
        description="This machine's address, on which the workers that the scheduler starts listen for gateways on "
        "other machines; unset: they are reached from this machine alone.",
    )
    launch: bool = Field(
        default=True,
        description="Whether the scheduler starts workers itself where none has come; else it waits for some to come.",
    )
    cluster: Literal["", "ray"] = Field(
        default="", description='"ray" has a Ray cluster place the workers, as actors; empty: the scheduler does.'
    )
    ray_address: str = Field(
        default="auto",
        min_length=1,
        description="The Ray cluster: ray://HOST:PORT, auto for the one that runs here, local to start one.",
    )
    ray_resources: dict[str, RayResources] = Field(
        default_factory=dict, description="By model: what a worker is promised on its node; unset means one CPU."
    )
    beat_s: float = Field(default=0.4, gt=0, le=60, description="Seconds between two signs of life on a link.")
    patience: int = Field(
        default=4, ge=2, le=10_000, description="Signs of life that a ready worker may miss before it counts as lost."
    )

    def ray(self) -> RayCluster | None:
        if not self.cluster:
            return None
        promised = {model: each.resources() for model, each in self.ray_resources.items()}
        return RayCluster(self.ray_address, promised, self.pair(), self.pace())

    def pace(self) -> HeartbeatConfig:
        return HeartbeatConfig(self.beat_s, self.patience)

    def pair(self) -> ClusterKeys | None:
        return None if self.keys is None else read_keys(self.keys.expanduser())
