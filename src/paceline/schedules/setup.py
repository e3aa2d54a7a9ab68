"""Everything a run holds, built once from its config in the order in which failures are cheapest."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from paceline.agents.protocol import EpisodePlayer
from paceline.checkpoint import CheckpointStore
from paceline.config import Config, ConfigError
from paceline.config.arithmetic import batch_arithmetic, check_context, check_lengths
from paceline.config.decisions import Decision, decide_old_logprob, decide_prefix_sharing
from paceline.config.parallelism import check_heads
from paceline.config.schema import AUTO_TOKEN_BUDGET
from paceline.data.loader import PromptLoader
from paceline.data.seeds import child_seed
from paceline.data.tasks import Task, build_task
from paceline.engine.critic import CriticEngine
from paceline.engine.meeting import any_rank
from paceline.engine.mesh import RankMesh
from paceline.engine.model_engine import ModelEngine
from paceline.engine.trainer import TrainEngine
from paceline.launch.signals import StopRequest
from paceline.model.loading import CausalModel, load_model, load_tokenizer, model_context, resolve_device
from paceline.model.lora import AdaptedModel, add_adapters
from paceline.model.packing_probe import ProbeResult, probe_packing
from paceline.rewards.combination import SourcedRewards
from paceline.rewards.pool import RewardPool
from paceline.rollout import RolloutEngine, RolloutStats
from paceline.rollout.early_stop import EarlyStopped
from paceline.rollout.recording import ReplayEngine, RolloutRecorder
from paceline.schedules.agent_setup import check_agent, open_agent
from paceline.schedules.critic_setup import open_critic
from paceline.schedules.display import Display
from paceline.schedules.engine_setup import (
    AnySync,
    EngineSite,
    describe_engine,
    open_engine,
    say_engine_advice,
)
from paceline.schedules.fused_layers import finish_model
from paceline.schedules.instruments import Instruments, open_instruments
from paceline.schedules.memory import probe_budget, settle_budget
from paceline.schedules.place import (
    Place,
    open_endpoint,
    open_folder,
    open_ledger,
    open_log,
    open_store,
    refused_together,
)
from paceline.schedules.recorded_rollouts import open_recorder, open_replay
from paceline.schedules.reward_setup import check_rewards, open_reward_models, start_rewards
from paceline.schedules.run_folder import RunFolder
from paceline.schedules.run_state import RunState
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricLog
from paceline.telemetry.sinks import check_sinks
from paceline.types import Prompt, RewardJob


@dataclass(slots=True)
class Run:
    """The parts of a run, alive."""

    config: Config
    mesh: RankMesh
    folder: RunFolder
    ledger: Ledger
    log: MetricLog | None
    """Metrics of the run; None where another rank writes them."""
    display: Display
    stop: StopRequest
    tokenizer: PreTrainedTokenizerBase
    task: Task
    loader: PromptLoader[Prompt]
    pool: RewardPool | SourcedRewards
    model: CausalModel
    reference: ModelEngine | CausalModel | None
    trainer: TrainEngine
    critic: CriticEngine | None
    engine: RolloutEngine
    sync: AnySync
    store: CheckpointStore
    instruments: Instruments
    old_logprob: Decision
    stop_token_ids: frozenset[int]
    state: RunState = field(default_factory=RunState)
    recorder: RolloutRecorder | None = None
    """Writes rollouts down; None where nobody asked or another rank does."""
    agent: EpisodePlayer | None = None
    """Plays episodes on the engine; None where samples are single answers."""
    finish_s: tuple[float, ...] = ()
    """Seconds from the last rollout's begin until each of this rank's samples had finished."""
    over_sampled: EarlyStopped | None = None
    """What the last rollout kept and dropped; None where it began no more groups than it needed."""
    replay: ReplayEngine | None = None
    """Gives training its samples in the engine's place."""

    @property
    def rollout_stats(self) -> RolloutStats:
        """Counts of the last rollout for training."""
        return self.engine.stats if self.replay is None else self.replay.stats

    @property
    def weight_version(self) -> int:
        """Version of the weights the rollout engine holds."""
        return self.engine.weight_version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self.engine.weight_version = version

    def stop_requested(self) -> bool:
        """Whether any rank has been asked to stop. All ranks must ask together, and all get the same answer."""
        return any_rank(self.mesh, self.ledger, self.stop.requested, "a request to stop")


@contextmanager
def open_run(config: Config, display: Display, place: Place | None = None) -> Iterator[Run]:
    """Builds a run and takes it down again, whatever happens in between; `place` is None for one process alone.

    Raises:
        ConfigError: anything that a person can mend, before training starts.
        UnsupportedModelError: the model's family cannot be packed.
    """
    place = place or Place(resolve_device(config.cluster.device))
    mesh, is_auto = place.mesh, config.batch.token_budget == AUTO_TOKEN_BUDGET
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        check_sinks(config.telemetry.sinks)
        folder = open_folder(config, place)
        stack.enter_context(folder.process_recorded())
        endpoint = stack.enter_context(open_endpoint(config, folder, place))
        if endpoint is not None:
            display.note(f"  metrics: {endpoint.url}")
        seed_and_threads(config)
        ledger = open_ledger(folder, place)
        stack.callback(ledger.close)
        with ledger.span("setup", "task"), refused_together(mesh):
            display.phase("reading the task")
            config, tokenizer, task, longest = _read_task(config, place, display)
            replay, recorder = open_replay(config), open_recorder(config, folder.is_writer)
            loader = PromptLoader(task.train, config.batch.num_prompts, config.run.seed, config.task.shuffle)
        pool = _open_rewards(config, task, folder, place)
        stack.callback(pool.close)
        with ledger.span("setup", "model"), refused_together(mesh):
            display.phase("loading the model")
            probe, trainer = _load_trainer(config, place, ledger)
            reference = load_reference(config, trainer, place, ledger) if _needs_reference(config) else None
            critic = open_critic(config, place, ledger, len(tokenizer), longest)
            open_reward_models(config, pool, _example_job(task), place, ledger)
            if is_auto:
                others = [] if critic is None else [critic.engine]
                found = probe_budget(config, trainer, others, place, task.longest_prompt, longest)
                display.note(f"  token budget: {found}")
        log = open_log(config, folder, place)
        if log is not None:
            stack.callback(log.close)
        with refused_together(mesh):
            display.phase("opening the rollout engine")
            say_engine_advice(config, trainer, display)
            engine, sync = open_engine(EngineSite(config, trainer, tokenizer, ledger, folder.path), stack)
        stop_token_ids = _stop_tokens(config, tokenizer, trainer.model.shape.vocab_size)
        context, log_path = trainer.model.max_context, folder.path / f"agent.rank{mesh.rank}.log"
        agent = open_agent(config, engine, tokenizer, stop_token_ids, context, ledger, log_path)
        if agent is not None:
            stack.callback(agent.close)
        run = Run(
            config=config,
            mesh=mesh,
            folder=folder,
            ledger=ledger,
            log=log,
            display=display,
            stop=stop,
            tokenizer=tokenizer,
            task=task,
            loader=loader,
            pool=pool,
            model=trainer.model,
            reference=reference,
            trainer=trainer,
            critic=critic,
            engine=engine,
            sync=sync,
            store=open_store(config, folder, place, ledger),
            instruments=open_instruments(stack, config, folder.path, ledger, place, display),
            old_logprob=decide_old_logprob(config),
            stop_token_ids=stop_token_ids,
            agent=agent,
            recorder=recorder,
            replay=replay,
        )
        folder.write_environment(trainer.model, probe, describe_engine(config, engine))
        for note in task.notes:
            display.note(f"  task: {note}")
        stack.callback(run.store.wait)
        yield run


def _read_task(
    config: Config, place: Place, display: Display
) -> tuple[Config, PreTrainedTokenizerBase, Task, int]:
    """The task and its tokenizer, checked against the model's context and the device; the config with what the task
    settles, and the longest sample there can be."""
    context = model_context(config.model)
    check_context(config, context)
    tokenizer = load_tokenizer(config.model)
    task = build_task(config, tokenizer, context)
    check_rewards(config, task.reward)
    check_agent(config, tokenizer)
    longest = check_lengths(config, task.longest_prompt, context)
    config = settle_budget(config, place, task.longest_prompt, longest)
    return settle_prefix_sharing(config, task, display), tokenizer, task, longest


def _load_trainer(config: Config, place: Place, ledger: Ledger) -> tuple[ProbeResult | None, TrainEngine]:
    """The trained model on its engine, probed while it is whole."""
    model = load_trained_model(config, place.device)
    check_heads(place.mesh.sizes, model.shape.num_heads, model.shape.num_kv_heads)
    probe = probe_packing(model) if config.model.verify_packing else None
    num_updates = batch_arithmetic(config, model.max_context).total_updates
    return probe, TrainEngine(model, config, ledger, num_updates, place.mesh)


def _open_rewards(config: Config, task: Task, folder: RunFolder, place: Place) -> RewardPool | SourcedRewards:
    """What scores this rank's samples. The ranks of a node share the workers of rules out."""
    rank = place.mesh.rank
    return start_rewards(
        config,
        task.reward,
        -(-config.task.reward_workers // place.num_local_ranks),
        folder.path / ("rewards.log" if rank == 0 else f"rewards.rank{rank}.log"),
    )


def _example_job(task: Task) -> RewardJob:
    prompt = task.train[0]
    return RewardJob(prompt.text, "A completion.", prompt.answer, prompt.metadata, prompt.messages)


def settle_prefix_sharing(config: Config, task: Task, display: Display) -> Config:
    """The config with `batch.share_prefixes` decided for this task's prompts, and said."""
    mean_prompt_tokens = sum(len(prompt.token_ids) for prompt in task.train) / len(task.train)
    sharing = decide_prefix_sharing(config, mean_prompt_tokens)
    display.note(
        f"  prompts in training: {'computed once per group' if sharing.shares else 'computed with every sample'} "
        f"({sharing.reason})"
    )
    batch = config.batch.model_copy(update={"share_prefixes": "on" if sharing.shares else "off"})
    return config.model_copy(update={"batch": batch})


def load_trained_model(config: Config, device: torch.device) -> CausalModel:
    """The model to train, with adapters where the config asks for them."""
    model = load_model(config.model, device, config.run.seed)
    if config.lora.rank:
        model = add_adapters(model, config.lora, config.model.path, child_seed(config.run.seed, "lora"))
    finish_model(config, model)
    return model


def load_reference(
    config: Config, trainer: TrainEngine, place: Place, ledger: Ledger
) -> ModelEngine | CausalModel:
    """The untrained model: the trained one without its adapters if it has any, else a second copy on its own mesh."""
    model = trainer.model
    if isinstance(model, AdaptedModel):
        return model.without_adapters()
    copy = load_model(config.model, model.device, config.run.seed)
    finish_model(config, copy)
    return ModelEngine(copy, config.train, config.batch, ledger, None, mesh=place.mesh_of("reference"))


def _needs_reference(config: Config) -> bool:
    return config.algorithm.kl_coefficient > 0.0


def seed_and_threads(config: Config) -> None:
    """Sampling and data have seeds of their own; these cover whatever a model's or user's code draws."""
    random.seed(config.run.seed)
    np.random.seed(config.run.seed % 2**32)
    torch.manual_seed(config.run.seed)
    if config.cluster.num_threads:
        torch.set_num_threads(config.cluster.num_threads)


def _stop_tokens(config: Config, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> frozenset[int]:
    """The tokenizer's end token and those the recipe adds.

    Raises:
        ConfigError: there is none, so every sample would run to its limit; or one that the model cannot sample.
    """
    found = set(config.rollout.stop_token_ids)
    if impossible := sorted(token for token in found if not 0 <= token < vocab_size):
        rule = f"the model has the tokens 0 to {vocab_size - 1}, so nothing would stop at {impossible[0]}"
        raise ConfigError("rollout.stop_token_ids", sorted(found), rule)
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if not found and not config.rollout.ignore_eos:
        raise ConfigError(
            "rollout.stop_token_ids", (), "the tokenizer names no end token, so a stop token must be given"
        )
    return frozenset(found)
