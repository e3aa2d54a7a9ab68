"""Everything a supervised run holds, built once from its config in the order in which failures are cheapest."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from paceline.checkpoint import CheckpointStore
from paceline.config import Config, ConfigError, check_context
from paceline.config.parallelism import check_heads
from paceline.config.rules import budget_problem
from paceline.config.sft import is_sft, sft_updates, warm_up_ends_in_sft
from paceline.data.loader import PromptLoader
from paceline.data.sft import SftData, SftRow, build_sft_data
from paceline.engine.meeting import any_rank
from paceline.engine.mesh import RankMesh
from paceline.engine.sft import SftEngine, SftSample
from paceline.launch.signals import StopRequest
from paceline.model.liger import apply_liger
from paceline.model.loading import CausalModel, load_tokenizer, model_context, resolve_device
from paceline.model.packing_probe import probe_packing
from paceline.schedules.display import Display
from paceline.schedules.instruments import Instruments, open_instruments
from paceline.schedules.memory import settle_budget
from paceline.schedules.place import (
    Place,
    open_endpoint,
    open_folder,
    open_ledger,
    open_log,
    open_store,
    refused_together,
)
from paceline.schedules.run_folder import RunFolder
from paceline.schedules.run_state import RunState
from paceline.schedules.setup import load_trained_model, seed_and_threads
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricLog
from paceline.telemetry.sinks import check_sinks


@dataclass(slots=True)
class SftRun:
    """The parts of a supervised run, alive. `evaluation` are the held-out rows as the engine takes them."""

    config: Config
    mesh: RankMesh
    folder: RunFolder
    ledger: Ledger
    log: MetricLog | None
    display: Display
    stop: StopRequest
    tokenizer: PreTrainedTokenizerBase
    data: SftData
    evaluation: tuple[SftSample, ...]
    loader: PromptLoader[SftRow]
    model: CausalModel
    trainer: SftEngine
    store: CheckpointStore
    instruments: Instruments
    num_steps: int
    weight_version: int = 0
    state: RunState = field(default_factory=RunState)

    @property
    def num_rows_planned(self) -> int:
        """Rows the epochs hold in all; the last update takes what is left of them."""
        return len(self.data.train) * self.config.sft.num_epochs

    def plan_the_rest(self) -> None:
        """After a resume: as many updates as the rows that are left need.

        Updates may take more or fewer rows than before, and there may be more epochs: counted from step 1, some rows
        would be learned once too often, or not at all.
        """
        left = max(0, self.num_rows_planned - self.loader.num_consumed)
        total = self.state.step + -(-left // self.config.batch.num_prompts)
        self.num_steps = min(total, self.config.sft.max_steps or total)
        self.trainer.optimizer.plan(self.num_steps)

    def stop_requested(self) -> bool:
        """Whether any rank has been asked to stop. All ranks must ask together, and all get the same answer."""
        return any_rank(self.mesh, self.ledger, self.stop.requested, "a request to stop")


@contextmanager
def open_sft_run(config: Config, display: Display, place: Place | None = None) -> Iterator[SftRun]:
    """Builds a run and takes it down again, whatever happens in between; `place` is None for one process alone.

    Raises:
        ConfigError: anything that a person can mend, before training starts.
        UnsupportedModelError: the model's family cannot be packed.
    """
    if not is_sft(config):
        raise ConfigError("schedule.name", config.schedule.name, "is not that of a supervised run", "sft")
    place = place or Place(resolve_device(config.cluster.device))
    mesh, device = place.mesh, place.device
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
        with ledger.span("setup", "rows"), refused_together(mesh):
            display.phase("reading the rows")
            context = model_context(config.model)
            check_context(config, context)
            tokenizer = load_tokenizer(config.model)
            data = build_sft_data(config, tokenizer, context)
            num_steps = _check_lengths(config, data)
            config = settle_budget(config, place, 0, data.longest)
            loader = PromptLoader(data.train, config.batch.num_prompts, config.run.seed, config.task.shuffle)
        with ledger.span("setup", "model"), refused_together(mesh):
            display.phase("loading the model")
            model = load_trained_model(config, device)
            check_heads(mesh.sizes, model.shape.num_heads, model.shape.num_kv_heads)
            probe = probe_packing(model) if config.model.verify_packing else None
            liger = apply_liger(model, config.sft.liger)
            trainer = SftEngine(model, config, ledger, num_steps, mesh)
        log = open_log(config, folder, place)
        if log is not None:
            stack.callback(log.close)
        run = SftRun(
            config=config,
            mesh=mesh,
            folder=folder,
            ledger=ledger,
            log=log,
            display=display,
            stop=stop,
            tokenizer=tokenizer,
            data=data,
            evaluation=tuple(sft_sample(row) for row in data.evaluation),
            loader=loader,
            model=trainer.engine.model,
            trainer=trainer,
            store=open_store(config, folder, place, ledger),
            instruments=open_instruments(stack, config, folder.path, ledger, place, display),
            num_steps=num_steps,
        )
        folder.write_environment(model, probe, {"liger": liger.is_used, "liger_reason": liger.reason})
        for note in data.notes:
            display.note(f"  rows: {note}")
        display.note(f"  liger kernels: {'on' if liger.is_used else 'off'} ({liger.reason})")
        stack.callback(run.store.wait)
        yield run


def sft_sample(row: SftRow) -> SftSample:
    """A row as the engine takes it."""
    return SftSample.from_tokens(row.token_ids, row.loss_mask)


def _check_lengths(config: Config, data: SftData) -> int:
    """Updates of the run. Raises `ConfigError` when the longest row exceeds a budget, or warm-up never ends."""
    num_steps = sft_updates(config, len(data.train))
    problem = warm_up_ends_in_sft(config, num_steps)
    if problem is None and config.batch.overlong == "refuse":
        problem = budget_problem(config, data.longest, "the longest row; sft.max_length bounds it")
    if problem is not None:
        raise problem
    return num_steps
