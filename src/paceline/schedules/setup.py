"""Everything a run holds, built once from its config in the order in which failures are cheapest."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from paceline.checkpoint import CheckpointStore, StopRequest
from paceline.config import Config, ConfigError
from paceline.config.arithmetic import batch_arithmetic, check_context, check_lengths
from paceline.config.decisions import Decision, decide_old_logprob
from paceline.data.loader import PromptLoader
from paceline.data.seeds import child_seed
from paceline.data.tasks import Task, build_task
from paceline.engine.critic import CriticEngine
from paceline.engine.trainer import TrainEngine
from paceline.model.fused import fuse_for_device
from paceline.model.loading import CausalModel, load_model, load_tokenizer, model_context, resolve_device
from paceline.model.lora import AdaptedModel, add_adapters
from paceline.model.packing_probe import probe_packing
from paceline.rewards.functions import resolve
from paceline.rewards.pool import RewardPool
from paceline.rollout import NativeEngine
from paceline.rollout.native.engine import EngineLimits
from paceline.schedules.critic_setup import open_critic
from paceline.schedules.display import Display
from paceline.schedules.memory import check_memory
from paceline.schedules.run_folder import RunFolder, open_run_folder
from paceline.sync import InProcessSync
from paceline.telemetry.device_memory import DeviceMemorySampler
from paceline.telemetry.host_memory import host_rss
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricLog
from paceline.telemetry.sinks import check_sinks, open_sinks
from paceline.types import Prompt


@dataclass(slots=True)
class RunState:
    """What a checkpoint carries beside tensors: progress and figures that belong to the whole run."""

    step: int = 0
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Run:
    """The parts of a run, alive."""

    config: Config
    folder: RunFolder
    ledger: Ledger
    log: MetricLog
    display: Display
    stop: StopRequest
    tokenizer: PreTrainedTokenizerBase
    task: Task
    loader: PromptLoader[Prompt]
    pool: RewardPool
    model: CausalModel
    reference: CausalModel | None
    trainer: TrainEngine
    critic: CriticEngine | None
    engine: NativeEngine
    sync: InProcessSync
    store: CheckpointStore
    old_logprob: Decision
    stop_token_ids: frozenset[int]
    state: RunState = field(default_factory=RunState)

    @property
    def weight_version(self) -> int:
        """Version of the weights the rollout engine holds."""
        return self.engine.weight_version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self.engine.weight_version = version


@contextmanager
def open_run(config: Config, display: Display) -> Iterator[Run]:
    """Builds a run and takes it down again, whatever happens in between.

    Raises:
        ConfigError: anything that a person can mend, before training starts.
        UnsupportedModelError: the model's family cannot be packed.
    """
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        check_sinks(config.telemetry.sinks)
        folder = open_run_folder(config)
        device = resolve_device(config.cluster.device)
        seed_and_threads(config)
        ledger = Ledger(
            folder.path / "ledger" / "rank0.jsonl",
            sample_memory=DeviceMemorySampler(device) if device.type == "cuda" else None,
            sample_host=host_rss,
            since_process_start=True,
        )
        stack.callback(ledger.close)
        with ledger.span("setup", "task"):
            display.phase("reading the task")
            context = model_context(config.model)
            check_context(config, context)
            tokenizer = load_tokenizer(config.model)
            task = build_task(config, tokenizer, context)
            resolve(task.reward)
            longest = check_lengths(config, task.longest_prompt, context)
            check_memory(config, device, task.longest_prompt)
            loader = PromptLoader(task.train, config.batch.num_prompts, config.run.seed, config.task.shuffle)
        pool = stack.enter_context(
            RewardPool(
                task.reward,
                config.task.reward_workers,
                config.task.reward_timeout_s,
                log_path=folder.path / "rewards.log",
            )
        )
        with ledger.span("setup", "model"):
            display.phase("loading the model")
            model = load_trained_model(config, device)
            probe = probe_packing(model) if config.model.verify_packing else None
            trainer = TrainEngine(
                model, config, ledger, batch_arithmetic(config, model.max_context).total_updates
            )
            reference = load_reference(config, trainer.model, device) if _needs_reference(config) else None
            critic = open_critic(config, device, ledger, len(tokenizer), longest)
        sinks = open_sinks(
            config.telemetry.sinks, folder.path, config.run.name, config.model_dump(mode="json")
        )
        log = MetricLog(folder.path, sinks)
        stack.callback(log.close)
        engine = NativeEngine(model, tokenizer, _engine_limits(config), ledger)
        parameters = model.module.named_parameters
        run = Run(
            config=config,
            folder=folder,
            ledger=ledger,
            log=log,
            display=display,
            stop=stop,
            tokenizer=tokenizer,
            task=task,
            loader=loader,
            pool=pool,
            model=model,
            reference=reference,
            trainer=trainer,
            critic=critic,
            engine=engine,
            sync=InProcessSync(engine, parameters, parameters, ledger),
            store=CheckpointStore(
                folder.path / "checkpoints",
                config.checkpoint.keep,
                on_written=lambda start_ns, end_ns: ledger.background(
                    "checkpoint", "write", start_ns, end_ns
                ),
            ),
            old_logprob=decide_old_logprob(config),
            stop_token_ids=_stop_tokens(config, tokenizer),
        )
        folder.write_environment(model, probe)
        for note in task.notes:
            display.note(f"  task: {note}")
        stack.callback(run.store.wait)
        yield run


def load_trained_model(config: Config, device: torch.device) -> CausalModel:
    """The model to train, with adapters where the config asks for them."""
    model = load_model(config.model, device, config.run.seed)
    if config.lora.rank:
        model = add_adapters(model, config.lora, config.model.path, child_seed(config.run.seed, "lora"))
    _fuse(config, model)
    return model


def load_reference(config: Config, model: CausalModel, device: torch.device) -> CausalModel:
    """The untrained model: `model` without its adapters if it has any, else a second copy."""
    if isinstance(model, AdaptedModel):
        return model.without_adapters()
    reference = load_model(config.model, device, config.run.seed)
    _fuse(config, reference)
    return reference


def _fuse(config: Config, model: CausalModel) -> None:
    # tensor parallelism hooks into the linear layers, which fused layers go round
    if config.train.preset == "fast" and config.cluster.tensor_parallel_size == 1:
        fuse_for_device(model.module, model.device, adjacent=config.cluster.num_devices == 1)


def _needs_reference(config: Config) -> bool:
    return config.algorithm.kl_coefficient > 0.0


def seed_and_threads(config: Config) -> None:
    """Sampling and data have seeds of their own; these cover whatever a model's or user's code draws."""
    random.seed(config.run.seed)
    np.random.seed(config.run.seed % 2**32)
    torch.manual_seed(config.run.seed)
    if config.cluster.num_threads:
        torch.set_num_threads(config.cluster.num_threads)


def _engine_limits(config: Config) -> EngineLimits:
    cache_gb = config.rollout.kv_cache_gb
    return EngineLimits(
        max_running=config.rollout.max_running,
        prefill_token_budget=config.batch.forward_token_budget or 2 * config.batch.token_budget,
        max_cache_bytes=None if cache_gb is None else int(cache_gb * 2**30),
    )


def _stop_tokens(config: Config, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokenizer's end token and those the recipe adds.

    Raises:
        ConfigError: there is none, so every sample would run to its limit.
    """
    found = set(config.rollout.stop_token_ids)
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if not found and not config.rollout.ignore_eos:
        raise ConfigError(
            "rollout.stop_token_ids", (), "the tokenizer names no end token, so a stop token must be given"
        )
    return frozenset(found)
