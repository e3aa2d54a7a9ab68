"""The reward of a run: one pool of a rule's workers, or several sources. What is cheap to refuse is refused first."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from paceline.config import Config, ConfigError
from paceline.config.reward_schema import JudgeSource, ModelSource, RemoteSource
from paceline.config.rewards import (
    model_source_budget,
    reward_sources,
    rule_names,
    source_key,
    source_model,
)
from paceline.data.seeds import child_seed
from paceline.engine.model_engine import ModelEngine
from paceline.model.loading import CausalModel, load_model, load_tokenizer, resolve_dtype
from paceline.model.packing_probe import probe_packing, probe_value_packing
from paceline.model.quantization import check_quantized, quantization_options
from paceline.model.value_head import load_reward_model
from paceline.reward_models.classifier import ClassifierScorer
from paceline.reward_models.conversation import check_template
from paceline.reward_models.judge import JudgeScorer, JudgeSettings
from paceline.reward_models.judge_text import JudgeTemplate, ScoreReader
from paceline.rewards.combination import RewardSource, SourcedRewards, Weighting
from paceline.rewards.functions import resolve
from paceline.rewards.pool import RewardPool
from paceline.rewards.remote import RemoteScorer
from paceline.rollout import NativeEngine
from paceline.rollout.native.engine import EngineLimits
from paceline.schedules.place import Place
from paceline.telemetry.ledger import Ledger
from paceline.types import RewardJob, RewardSpec


def check_rewards(config: Config, task_reward: RewardSpec) -> None:
    """Imports every rule once, in this process.

    Raises:
        ConfigError: one of them cannot be used.
    """
    for spec in _rules(config, task_reward).values():
        resolve(spec)


def start_rewards(
    config: Config, task_reward: RewardSpec, num_workers: int, log_path: Path
) -> RewardPool | SourcedRewards:
    """`num_workers` of every rule start, and services are ready to be asked.

    Raises:
        ConfigError: a source lacks what it needs from the environment.
    """
    sources = reward_sources(config)
    if not sources:
        return RewardPool(task_reward, num_workers, config.task.reward_timeout_s, log_path)
    weightings = {name: Weighting(source.weight, source.optional) for name, source in sources.items()}
    opened: dict[str, RewardSource] = {}
    for name, source in sources.items():
        if isinstance(source, RemoteSource):
            opened[name] = RemoteScorer(source, source_key(config, name, "auth_env"))
    for name, spec in _rules(config, task_reward).items():
        opened[name] = RewardPool(spec, num_workers, config.task.reward_timeout_s, log_path)
    return SourcedRewards(weightings, opened)


def open_reward_models(
    config: Config, rewards: RewardPool | SourcedRewards, example: RewardJob, place: Place, ledger: Ledger
) -> None:
    """Loads the models among the sources. `example` is a job of this task, which their templates must take.

    Raises:
        ConfigError: a model cannot be loaded or cannot be used as its source says.
    """
    if not isinstance(rewards, SourcedRewards):
        return
    for name, source in reward_sources(config).items():
        section = f"reward.sources.{name}"
        if isinstance(source, ModelSource):
            rewards.add(name, _open_classifier(config, source, section, example, place, ledger))
        elif isinstance(source, JudgeSource):
            rewards.add(name, _open_judge(config, source, section, place, ledger))


def _open_classifier(
    config: Config, source: ModelSource, section: str, example: RewardJob, place: Place, ledger: Ledger
) -> ClassifierScorer:
    settings = source_model(config, source)
    tokenizer = load_tokenizer(settings, section)
    check_template(tokenizer, example, f"{section}.chat_template")
    model = load_reward_model(settings, place.device, f"{section}.path", source.quantization)
    _check_vocabulary(model, tokenizer, section)
    # 8-bit products choose what they leave in 16 bits by looking at the whole batch: packed ones round differently
    if config.model.verify_packing and source.quantization != "int8":
        probe_value_packing(model, f"{section}.path")
    mesh = place.mesh_of("reward")
    budget = model_source_budget(config, source)
    batch = config.batch.model_copy(update={"forward_token_budget": budget})
    return ClassifierScorer(
        model,
        tokenizer,
        ModelEngine(model, config.train, batch, ledger, None, mesh=mesh),
        ledger,
        # one token is appended to every conversation; padded widths are multiples of the ranks that share them
        max_tokens=min(model.max_context, (budget - 1) * mesh.sp_size) - 1,
        host_between_uses=source.host_between_uses,
    )


def _open_judge(
    config: Config, source: JudgeSource, section: str, place: Place, ledger: Ledger
) -> JudgeScorer:
    settings = source_model(config, source)
    template = JudgeTemplate(source.template, f"{section}.template")
    tokenizer = load_tokenizer(settings, section)
    dtype = resolve_dtype(settings.dtype, place.device)
    options = quantization_options(
        source.quantization, place.device, dtype, ["lm_head"], f"{section}.quantization"
    )
    model = load_model(settings, place.device, key=f"{section}.path", options=options)
    check_quantized(model.module, source.quantization, place.device, f"{section}.quantization")
    model.module.requires_grad_(False)
    _check_vocabulary(model, tokenizer, section)
    if source.max_new_tokens >= model.max_context:
        rule = f"leaves nothing of the judge's context of {model.max_context} tokens for the request"
        raise ConfigError(
            f"{section}.max_new_tokens", source.max_new_tokens, rule, str(model.max_context // 2)
        )
    if config.model.verify_packing and source.quantization != "int8":
        probe_packing(model)
    limits = EngineLimits(
        max_running=source.max_running,
        prefill_token_budget=config.batch.forward_token_budget or 2 * config.batch.token_budget,
    )
    return JudgeScorer(
        model,
        tokenizer,
        NativeEngine(model, tokenizer, limits, ledger),
        ledger,
        template,
        ScoreReader.of(source),
        JudgeSettings(
            source.temperature,
            source.max_new_tokens,
            child_seed(config.run.seed, "judge", section),
            source.host_between_uses,
        ),
    )


def _check_vocabulary(model: CausalModel, tokenizer: PreTrainedTokenizerBase, section: str) -> None:
    vocabulary = model.module.config.get_text_config().vocab_size
    if vocabulary < len(tokenizer):
        rule = f"its tokenizer has {len(tokenizer)} token ids, and the model reads {vocabulary}"
        raise ConfigError(f"{section}.tokenizer_path", tokenizer.name_or_path, rule, "null")


def _rules(config: Config, task_reward: RewardSpec) -> dict[str, RewardSpec]:
    return {
        source: task_reward if function == task_reward.name else RewardSpec(function)
        for source, function in rule_names(config, task_reward.name).items()
    }
