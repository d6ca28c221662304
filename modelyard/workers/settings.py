"""The `[workers]` section of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from modelyard import plugins
from modelyard.workers.transport import ClusterKeys, HeartbeatConfig, own_keys, read_keys

if TYPE_CHECKING:
    from modelyard.workers.worker_pool import Cluster


class RayResources(BaseModel):
    model_config = ConfigDict(extra="forbid")

    num_cpus: float = Field(default=1.0, ge=0, description="CPUs.")
    num_gpus: float = Field(default=0.0, ge=0, description="GPUs, or a share of one.")
    memory: int | None = Field(default=None, gt=0, description="Bytes of RAM.")
    custom: dict[str, float] = Field(default_factory=dict, description="Custom Ray resources by name.")

    def options(self) -> dict[str, Any]:
        """The options of a Ray actor."""
        options = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "resources": self.custom}
        return options if self.memory is None else options | {"memory": self.memory}


class WorkerSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: Path | None = Field(
        default=None,
        description="File of the cluster's keys, made with modelyard keys cluster; needed for addresses that other "
        "machines can reach. Unset: ipc sockets are private, and loopback addresses use keys that are created for "
        "this user.",
    )
    host: str | None = Field(
        default=None,
        min_length=1,
        description="This machine's address. The workers that the scheduler starts listen on it for gateways on other "
        "machines; unset: they are reachable from this machine only.",
    )
    launch: bool = Field(
        default=True,
        description="Whether the scheduler starts workers itself if none has registered; otherwise it waits for them.",
    )
    cluster: Literal["", "ray"] = Field(
        default="", description='"ray": a Ray cluster places the workers as actors; empty: the scheduler does.'
    )
    ray_address: str = Field(
        default="auto",
        min_length=1,
        description="The Ray cluster: ray://HOST:PORT, auto for the one that runs here, local to start one.",
    )
    ray_resources: dict[str, RayResources] = Field(
        default_factory=dict, description="By model: what Ray reserves for a worker; unset means one CPU."
    )
    patience: int = Field(
        default=4,
        ge=2,
        le=10_000,
        description="Heartbeats (0.4 s) that a ready worker may miss before it counts as lost.",
    )

    def make_cluster(self) -> Cluster | None:
        if not self.cluster:
            return None
        made: Cluster = plugins.load("clusters", self.cluster)(
            self.ray_address, self.ray_resources, self.cluster_keys(), self.heartbeat()
        )
        return made

    def heartbeat(self) -> HeartbeatConfig:
        return HeartbeatConfig(worker_misses=self.patience)

    def cluster_keys(self) -> ClusterKeys | None:
        """None: each link uses what its address needs. Actors of a Ray cluster may run on any address."""
        if self.keys is not None:
            return read_keys(self.keys.expanduser())
        return own_keys() if self.cluster else None
