"""The rollout engine of a run, and how weights get into it."""

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paceline.config import Config
from paceline.config.decisions import shares_weights
from paceline.config.engine_advice import engine_advice
from paceline.engine.sharding import unsharded
from paceline.engine.trainer import TrainEngine
from paceline.model.loading import CausalModel
from paceline.rollout import NativeEngine, PagedEngine
from paceline.rollout.native.choice import CacheKind, engine_features, open_native_engine
from paceline.rollout.native.engine import EngineLimits
from paceline.rollout.native.paged.drafts import DraftSettings
from paceline.rollout.protocol import RolloutEngine
from paceline.rollout.remote.child import ChildCommand, EngineChild
from paceline.rollout.remote.engine import EngineLink, RemoteEngine, RemoteLimits
from paceline.rollout.remote.weight_files import WeightTransfer
from paceline.rollout.replica import Replica, generation_flops
from paceline.rollout.router import ReplicaRouter, RouterSettings
from paceline.rollout.server.http import HttpEndpoint
from paceline.rollout.server.link import ServerLink
from paceline.rollout.sglang.server import SglangApi
from paceline.rollout.vllm.arguments import FOREIGN, ServedModel, engine_arguments, process_environment
from paceline.rollout.vllm.server import VllmServerApi, start_server
from paceline.schedules.display import Display
from paceline.schedules.engine_resources import check_resources
from paceline.schedules.engine_weights import CopyEngine, published_weights, verify_logprobs
from paceline.sync import CopySync, GatheredSync, InProcessSync
from paceline.telemetry.ledger import Ledger


@dataclass(frozen=True, slots=True)
class EngineSite:
    """What an engine is opened with."""

    config: Config
    trainer: TrainEngine
    tokenizer: PreTrainedTokenizerBase
    ledger: Ledger
    run_dir: Path

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.trainer.engine.mesh.rank

    @property
    def model(self) -> CausalModel:
        """The trained model."""
        return self.trainer.model


AnySync = InProcessSync | GatheredSync | CopySync[CausalModel]


def open_engine(site: EngineSite, stack: ExitStack) -> tuple[RolloutEngine, AnySync]:
    """The engine and its weight sync; engines in processes of their own end with `stack`.

    Raises:
        ConfigError: what is asked for is not there (a Python with vLLM, devices, memory); nothing was waited for.
        ReplicaError: an engine did not start.
    """
    config = site.config
    if shares_weights(config):
        sharded = site.trainer.engine.sharded
        native = open_native_engine(
            sharded.view or sharded.model,
            site.tokenizer,
            _cache_kind(config),
            engine_limits(config),
            site.ledger,
            weights_stay=site.trainer.engine.mesh.world_size == 1,
            drafts=_draft_settings(config),
        )
        return native, _shared_sync(native, site)
    check_resources(config, site.model)
    engine = _open_replicas(site)
    stack.callback(engine.close)
    with site.ledger.span("setup", "start rollout engines"):
        engine.wait_ready()
    return engine, _copy_sync(engine, site)


def say_engine_advice(config: Config, trainer: TrainEngine, display: Display) -> None:
    """Prints what works and is probably slow."""
    device = trainer.model.device
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    weights = sum(t.numel() * t.element_size() for t in trainer.model.module.parameters())
    for advice in engine_advice(
        config, on_cpu=device.type == "cpu", weight_bytes=weights, device_bytes=memory
    ):
        display.note(f"  advice: {advice}")


def describe_engine(config: Config, engine: RolloutEngine) -> dict[str, object]:
    """What env.json says of the engine: its name, how many, and what it said of itself."""
    found = {"rollout_engine": config.rollout.engine, "rollout_replicas": config.rollout.num_replicas}
    if isinstance(engine, NativeEngine | PagedEngine):
        return {**found, **engine_features(engine)}
    facts = engine.facts if isinstance(engine, ReplicaRouter) else {}
    return {**found, **{f"rollout_{name}": value for name, value in facts.items() if name != "engine"}}


def engine_limits(config: Config) -> EngineLimits:
    """Sizes of the native engine."""
    cache_gb = config.rollout.kv_cache_gb
    return EngineLimits(
        max_running=config.rollout.max_running,
        prefill_token_budget=config.batch.forward_token_budget or 2 * config.batch.token_budget,
        max_cache_bytes=None if cache_gb is None else int(cache_gb * 2**30),
    )


def _draft_settings(config: Config) -> DraftSettings | None:
    rollout = config.rollout
    if rollout.speculation == "off":
        return None
    return DraftSettings(rollout.speculation, rollout.draft_tokens, rollout.speculate_below)


def _cache_kind(config: Config) -> CacheKind:
    return "paged" if config.rollout.exact else config.rollout.cache


# --- weights ---


def _shared_sync(engine: NativeEngine | PagedEngine, site: EngineSite) -> InProcessSync | GatheredSync:
    mesh, sharded = site.trainer.engine.mesh, site.trainer.engine.sharded
    if mesh.world_size == 1:
        parameters = site.model.module.named_parameters
        return InProcessSync(engine, parameters, parameters, site.ledger)

    @contextmanager
    def gathered() -> Iterator[Iterable[tuple[str, Tensor]]]:
        with unsharded(sharded) as whole:
            yield whole.module.named_parameters()

    return GatheredSync(engine, gathered, mesh.gather_objects, site.ledger)


def _copy_sync(engine: CopyEngine, site: EngineSite) -> CopySync[CausalModel]:
    policies = {"native": "off", "vllm": site.config.rollout.vllm.verify_logprobs, "sglang": "every"}
    policy = policies[site.config.rollout.engine]
    return CopySync(
        engine,
        lambda: unsharded(site.trainer.engine.sharded),
        published_weights,
        lambda model: verify_logprobs(engine, model),
        site.ledger,
        num_verified={"every": None, "first": 2, "off": 0}[policy],
    )


# --- engines in processes of their own ---


def _open_replicas(site: EngineSite) -> ReplicaRouter:
    config = site.config
    replicas = config.rollout.replicas
    transfer = _transfer(config)
    limits = RemoteLimits(replicas.start_timeout_s, replicas.timeout_s, transfer)
    prefix = f"rank{site.rank}-" if site.trainer.engine.mesh.world_size > 1 else ""

    def open_replica(name: str, notify: Callable[[], None]) -> Replica:
        full_name = prefix + name
        log = site.run_dir / f"rollout-{full_name}.log"
        return RemoteEngine(
            full_name,
            lambda notified: _open_link(site, full_name, int(name), log, notified),
            site.tokenizer,
            limits,
            notify=notify,
        )

    settings = RouterSettings(
        config.rollout.num_replicas,
        replicas.affinity_margin,
        replicas.max_queued or 2 * _running_at_a_time(config),
        replicas.max_restarts,
        replicas.timeout_s,
        transfer,
    )
    return ReplicaRouter(settings, open_replica, generation_flops(site.model.shape))


def _transfer(config: Config) -> WeightTransfer:
    if config.rollout.engine == "sglang":
        return WeightTransfer("file", config.rollout.sglang.weight_dir)
    vllm = config.rollout.vllm
    if vllm.mode == "colocated":
        return WeightTransfer("direct")
    return WeightTransfer("cuda_ipc" if vllm.weight_transfer == "cuda_ipc" else "file", vllm.weight_dir)


def _open_link(site: EngineSite, name: str, number: int, log: Path, notify: Callable[[], None]) -> EngineLink:
    """A replica's process, or the connection to its server."""
    config = site.config
    if config.rollout.engine == "native":
        return EngineChild(name, native_command(site, number), log, notify)
    if config.rollout.engine == "sglang":
        endpoint = HttpEndpoint(config.rollout.sglang.addresses[number], config.rollout.replicas.timeout_s)
        return ServerLink(name, SglangApi(endpoint, config.rollout.sglang.sleep), notify)
    if config.rollout.vllm.mode == "server":
        return _open_vllm_server(site, name, number, log, notify)
    if config.rollout.vllm.mode == "colocated":
        os.environ.update(process_environment(config.rollout.vllm))
        sys.path.insert(0, str(FOREIGN))  # vLLM imports the worker extension by name
        colocated = importlib.import_module("paceline.rollout.vllm.colocated")  # needs vLLM
        arguments = engine_arguments(config.rollout.vllm, served_model(site))
        link: EngineLink = colocated.open_link(name, arguments, _sleep_level(config), notify)
        return link
    return EngineChild(name, vllm_command(site, number), log, notify)


def _open_vllm_server(
    site: EngineSite, name: str, number: int, log: Path, notify: Callable[[], None]
) -> ServerLink:
    config, vllm = site.config, site.config.rollout.vllm
    on_cpu, sleep_level = site.model.device.type == "cpu", _sleep_level(config)
    process = None
    if vllm.addresses:
        address = vllm.addresses[number]
    else:
        devices = _devices_of(config, number) or _own_device(site.model.device)
        process, address = start_server(vllm, served_model(site), devices, log, 0 if on_cpu else sleep_level)
    endpoint = HttpEndpoint(address, config.rollout.replicas.timeout_s)
    return ServerLink(
        name, VllmServerApi(endpoint, not on_cpu, 0 if on_cpu else sleep_level), notify, process, log
    )


def _running_at_a_time(config: Config) -> int:
    rollout = config.rollout
    return rollout.vllm.max_num_seqs if rollout.engine == "vllm" else rollout.max_running


def native_command(site: EngineSite, number: int) -> ChildCommand:
    """How to start a native replica."""
    config, limits = site.config, engine_limits(site.config)
    devices = _devices_of(config, number)
    setup = {
        "model": {**config.model.model_dump(), "verify_packing": False},
        "device": site.model.device.type if devices else str(site.model.device),
        "cache": _cache_kind(config),
        "exact": config.rollout.exact,
        "drafts": None if (drafts := _draft_settings(config)) is None else asdict(drafts),
        "fused": config.train.preset == "fast" and config.cluster.tensor_parallel_size == 1,
        "limits": {
            "max_running": limits.max_running,
            "prefill_token_budget": limits.prefill_token_budget,
            "max_cache_bytes": limits.max_cache_bytes,
        },
        "num_threads": config.rollout.replicas.num_threads,
        "seed": config.run.seed,
    }
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
    return ChildCommand("paceline.rollout.native.worker", setup, environment=environment)


def vllm_command(site: EngineSite, number: int) -> ChildCommand:
    """How to start vLLM in a process of its own."""
    config = site.config
    vllm = config.rollout.vllm
    devices = _devices_of(config, number) or _own_device(site.model.device)
    return ChildCommand(
        "paceline.rollout.foreign.vllm_worker",
        {"arguments": engine_arguments(vllm, served_model(site)), "sleep_level": _sleep_level(config)},
        vllm.python or sys.executable,
        process_environment(vllm, devices),
    )


def served_model(site: EngineSite) -> ServedModel:
    """What vLLM serves."""
    config, model = site.config, site.model
    return ServedModel(
        path=config.model.path,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=min(model.max_context, config.model.max_context or model.max_context),
        seed=config.run.seed + site.rank,
        on_cpu=model.device.type == "cpu",
        revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
    )


def _sleep_level(config: Config) -> int:
    return 0 if config.rollout.replicas.devices else config.rollout.vllm.sleep_level


def _devices_of(config: Config, number: int) -> tuple[str, ...]:
    size = config.rollout.vllm.tensor_parallel_size
    return device_names(config.rollout.replicas.devices[number * size : (number + 1) * size])


def _own_device(device: torch.device) -> tuple[str, ...]:
    return device_names([device.index or 0]) if device.type == "cuda" else ()


def device_names(numbers: Sequence[int]) -> tuple[str, ...]:
    """What other processes call the devices that torch shows here under `numbers`: this process may see some of the
    machine's only, by number or by UUID, and gives its devices numbers of their own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = visible.split(",") if visible else None
    return tuple(str(number) if listed is None else listed[number].strip() for number in numbers)
