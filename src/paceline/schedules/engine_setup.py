"""The rollout engine of a run, and how weights get into it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paceline.batching.prefixes import PackItem, build_pack
from paceline.config import Config, ConfigError
from paceline.config.decisions import shares_weights
from paceline.config.engine_advice import engine_advice
from paceline.engine.sharding import unsharded
from paceline.engine.trainer import TrainEngine
from paceline.model.inputs import packed_inputs, score
from paceline.model.loading import CausalModel
from paceline.model.logprob_head import HeadSettings
from paceline.model.lora import AdaptedModel
from paceline.rollout import NativeEngine, PagedEngine
from paceline.rollout.native.choice import CacheKind, engine_features, open_native_engine
from paceline.rollout.native.engine import EngineLimits
from paceline.rollout.native.paged.drafts import DraftSettings
from paceline.rollout.protocol import RolloutEngine
from paceline.rollout.remote.child import ChildCommand, EngineChild
from paceline.rollout.remote.engine import RemoteEngine, RemoteLimits
from paceline.rollout.replica import Replica, generation_flops
from paceline.rollout.router import ReplicaRouter, RouterSettings
from paceline.rollout.vllm.arguments import ServedModel, engine_arguments, process_environment
from paceline.schedules.display import Display
from paceline.sync import CopySync, GatheredSync, InProcessSync, WeightSyncError
from paceline.telemetry.ledger import Ledger

_PROBE = (11, 7, 5, 3, 13, 17, 23, 19, 29, 31, 37, 41, 2, 43, 47, 53)
_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.2, torch.float16: 0.1}
"""Mean difference in nats of an engine's log-probs on the probe: rounding is far below, other weights far above."""


class CopyEngine(RolloutEngine, Protocol):
    """A rollout engine with a copy of the weights."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `StreamingEngine.load_weights`."""
        ...

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Log-probs of prompts, where the engine can say."""
        ...


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
    policy = site.config.rollout.vllm.verify_logprobs if site.config.rollout.engine == "vllm" else "off"
    return CopySync(
        engine,
        lambda: unsharded(site.trainer.engine.sharded),
        published_weights,
        lambda model: verify_logprobs(engine, model),
        site.ledger,
        num_verified={"every": None, "first": 2, "off": 0}[policy],
    )


def published_weights(model: CausalModel) -> list[tuple[str, Tensor]]:
    """Parameters under the names of the model's own checkpoint, adapters merged in; tied ones once."""
    if not isinstance(model, AdaptedModel):
        return list(model.module.named_parameters())
    own = {
        name.replace(".base_layer.", ".")
        for name, _ in model.module.named_parameters()
        if ".lora_" not in name
    }
    return [(name, tensor) for name, tensor in model.merged_state_dict().items() if name in own]


@torch.no_grad()
def verify_logprobs(engine: CopyEngine, model: CausalModel) -> None:
    """Compares log-probs of a fixed probe, the engine's with the trainer's.

    Raises:
        WeightSyncError: they differ by more than rounding: the engine computes with other weights than it was given.
    """
    vocabulary = model.head_weight_VE.shape[0]
    tokens = tuple(token % vocabulary for token in _PROBE)
    found = engine.score([tokens])
    if found is None:
        return
    pack = build_pack([PackItem(tokens[:1], (tokens[1:],))], share_prefixes=False)
    head = HeadSettings(1.0, model.logit_softcap, len(tokens))
    expected_R, _ = score(model, packed_inputs(pack, model.device), head)
    difference = float((expected_R.cpu() - torch.tensor(found[0])).abs().mean())
    if not difference <= _TOLERANCE[model.dtype]:
        raise WeightSyncError(
            f"after loading, the rollout engine's log-probs of a probe differ from the trainer's by {difference:.3g} "
            "nats on average: it does not compute with the weights it was given"
        )


# --- engines in processes of their own ---


def _open_replicas(site: EngineSite) -> ReplicaRouter:
    config = site.config
    replicas = config.rollout.replicas
    command = {"native": native_command, "vllm": vllm_command}[config.rollout.engine]
    limits = RemoteLimits(replicas.start_timeout_s, replicas.timeout_s, config.rollout.vllm.weight_dir)
    site_names = f"rank{site.rank}-" if site.trainer.engine.mesh.world_size > 1 else ""

    def open_replica(name: str, notify: Callable[[], None]) -> Replica:
        full_name = site_names + name
        made = command(site, int(name))
        log = site.run_dir / f"rollout-{full_name}.log"
        return RemoteEngine(
            full_name,
            lambda notified: EngineChild(full_name, made, log, notified),
            site.tokenizer,
            limits,
            notify=notify,
        )

    settings = RouterSettings(
        config.rollout.num_replicas,
        replicas.affinity_margin,
        replicas.max_queued or 2 * _running_at_a_time(config),
        replicas.max_restarts,
        config.rollout.vllm.weight_dir,
    )
    return ReplicaRouter(settings, open_replica, generation_flops(site.model.shape))


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
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}
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


def _devices_of(config: Config, number: int) -> tuple[int, ...]:
    size = config.rollout.vllm.tensor_parallel_size
    return config.rollout.replicas.devices[number * size : (number + 1) * size]


def _own_device(device: torch.device) -> tuple[int, ...]:
    """The trainer's device by the number other processes know it by."""
    if device.type != "cuda":
        return ()
    index = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (index,) if not visible else (int(visible.split(",")[index]),)


# --- what must be there before anything is waited for ---


def check_resources(config: Config, model: CausalModel) -> None:
    """Refuses what this machine cannot give, before any engine is started.

    Raises:
        ConfigError: see the message.
    """
    _check_devices(config, model.device)
    rollout, weights = config.rollout, sum(t.numel() * t.element_size() for _, t in published_weights(model))
    _check_space(rollout.vllm.weight_dir, weights)
    if rollout.engine == "vllm":
        _check_python(rollout.vllm.python)
    if model.device.type == "cpu":
        cache_gb = rollout.vllm.kv_cache_gb if rollout.engine == "vllm" else rollout.kv_cache_gb or 0.0
        needed = rollout.num_replicas * (weights + cache_gb * 2**30)
        total = psutil.virtual_memory().total
        if needed > total:
            rule = (
                f"replicas of {weights / 2**30:.1f} GiB of weights and {cache_gb:g} GiB of cache need "
                f"{needed / 2**30:.0f} GiB, and this machine has {total / 2**30:.0f}"
            )
            nearest = str(int(total // (needed / rollout.num_replicas)) or "a smaller cache")
            raise ConfigError("rollout.num_replicas", rollout.num_replicas, rule, nearest)


def _check_devices(config: Config, device: torch.device) -> None:
    devices = config.rollout.replicas.devices
    present = torch.cuda.device_count() if device.type == "cuda" else 0
    missing = [number for number in devices if number >= present]
    if missing:
        rule = f"this machine shows {present} devices to torch"
        nearest = str(list(range(present))) if present else "leave it out"
        raise ConfigError("rollout.replicas.devices", list(devices), rule, nearest)


def _check_python(python: str | None) -> None:
    chosen = python or sys.executable
    key = "rollout.vllm.python"
    if shutil.which(chosen) is None:
        raise ConfigError(key, python, "is no program that can be run", "a virtual environment's bin/python")
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([chosen, "-c", code], check=False, capture_output=True).returncode:
        rule = "has no vLLM; name a Python that has (docs/rollout-engines.md)"
        raise ConfigError(key, python, rule, "a virtual environment's bin/python")


def _check_space(folder: str, num_bytes: int) -> None:
    if not Path(folder).is_dir():
        return  # the system's temporary folder is taken (remote/weight_files.py)
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        rule = f"holds {free / 2**30:.1f} GiB, and the weights are {num_bytes / 2**30:.1f} GiB"
        raise ConfigError("rollout.vllm.weight_dir", folder, rule, "a folder with more room")
