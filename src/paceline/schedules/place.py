"""Where a driver runs: this rank's device and mesh, and the records that are its own."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from rich.console import Console

from paceline.checkpoint import CheckpointStore
from paceline.checkpoint.ranks import from_rank_zero
from paceline.config import Config, ConfigError
from paceline.config.parallelism import ROLES, Role, check_model_heads, role_sizes
from paceline.engine.mesh import RankMesh
from paceline.launch.placement import find_placement
from paceline.launch.process_group import joined_ranks
from paceline.launch.stage_board import open_board
from paceline.monitor.server import MetricsServer
from paceline.schedules.display import Display
from paceline.schedules.run_folder import RunFolder, open_run_folder
from paceline.telemetry.device_memory import DeviceMemorySampler
from paceline.telemetry.host_memory import host_rss
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricLog
from paceline.telemetry.sinks import open_sinks


@dataclass(frozen=True, slots=True)
class Place:
    """This rank among those of the run; `num_local_ranks` of them share its node."""

    device: torch.device
    mesh: RankMesh = field(default_factory=RankMesh.single)
    num_local_ranks: int = 1
    role_meshes: Mapping[Role, RankMesh] = field(default_factory=dict)
    """Meshes of the roles that are divided in another way than the actor."""

    def mesh_of(self, role: Role) -> RankMesh:
        """The same ranks as a role's model is divided over them."""
        return self.role_meshes.get(role, self.mesh)


@contextmanager
def placed(config: Config) -> Iterator[Place]:
    """Joins the ranks a launcher has started; one process alone joins nobody.

    Raises:
        ConfigError: the ranks are not as many as the config says, or cannot be divided as it says.
    """
    sizes = {role: role_sizes(config, role) for role in ROLES}
    check_model_heads(config)
    with joined_ranks(config) as device:
        if not dist.is_initialized():
            yield Place(device)
            return
        placement = find_placement(os.environ)
        assert placement is not None  # nobody else joins ranks
        timeout_s = config.cluster.collective_timeout_s
        mesh = RankMesh.from_process_group(sizes["actor"], device.type, timeout_s)
        others = {
            role: RankMesh.from_process_group(sizes[role], device.type, timeout_s)
            for role in ROLES
            if sizes[role] != sizes["actor"]
        }
        yield Place(device, mesh, placement.local_world_size, others)


def open_display(
    title: str,
    config: Config,
    place: Place,
    console: Console | None,
    num_steps: int | None = None,
    **kind: str,
) -> Display:
    """What a person sees: the first rank's display; the others' show nothing."""
    if not place.mesh.is_first:
        return Display(title, config.run.num_steps, "off", Console(quiet=True))
    steps = config.run.num_steps if num_steps is None else num_steps
    return Display(title, steps, config.telemetry.live, console, **kind)


@contextmanager
def refused_together(mesh: RankMesh) -> Iterator[None]:
    """A refusal by one rank is one by all: the others would wait for it. Every rank enters and leaves.

    Raises:
        ConfigError: what the first refusing rank said.
    """
    error: ConfigError | None = None
    try:
        yield
    except ConfigError as raised:
        error = raised
    found = next((refusal for refusal in mesh.gather_objects(error) if refusal is not None), None)
    if found is not None:
        raise found if error is None else error


def open_folder(config: Config, place: Place) -> RunFolder:
    """The run's folder, opened by the first rank; the others write no record of the whole run."""
    folder = from_rank_zero(place.mesh, lambda: open_run_folder(config))
    return replace(folder, is_writer=place.mesh.is_first)


def open_ledger(folder: RunFolder, place: Place) -> Ledger:
    """This rank's own ledger."""
    return Ledger(
        folder.path / "ledger" / f"rank{place.mesh.rank}.jsonl",
        rank=place.mesh.rank,
        sample_memory=DeviceMemorySampler(place.device) if place.device.type == "cuda" else None,
        sample_host=host_rss,
        since_process_start=True,
        on_stage=open_board(find_placement(os.environ)),
    )


def open_log(config: Config, folder: RunFolder, place: Place) -> MetricLog | None:
    """metrics.jsonl and the sinks, on the first rank."""
    if not place.mesh.is_first:
        return None
    sinks = open_sinks(config.telemetry.sinks, folder.path, config.run.name, config.model_dump(mode="json"))
    return MetricLog(folder.path, sinks)


@contextmanager
def open_endpoint(config: Config, folder: RunFolder, place: Place) -> Iterator[MetricsServer | None]:
    """The OpenMetrics endpoint on the first rank, where the config wants one. Every rank enters.

    Raises:
        ConfigError: the port is taken; on every rank.
    """
    settings = config.telemetry
    with ExitStack() as stack:
        server = None
        with refused_together(place.mesh):
            if settings.metrics_port and place.mesh.is_first:
                opened = MetricsServer(folder.path, settings.metrics_port, settings.metrics_host)
                server = stack.enter_context(opened)
        yield server


def open_store(config: Config, folder: RunFolder, place: Place, ledger: Ledger) -> CheckpointStore:
    """The run's checkpoints, to which every rank adds what it holds."""
    return CheckpointStore(
        folder.path / "checkpoints",
        config.checkpoint.keep,
        ranks=place.mesh,
        others_timeout_s=config.cluster.collective_timeout_s,
        on_written=lambda start_ns, end_ns: ledger.background("checkpoint", "write", start_ns, end_ns),
    )
