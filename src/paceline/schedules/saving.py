"""What a checkpoint of a run holds, and how a run takes it up again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from paceline.checkpoint import Held, Loaded, Piece, export_hf, replaced_folder
from paceline.config import Change, Config, ConfigError, changed_settings
from paceline.engine.critic import CriticEngine
from paceline.engine.model_engine import ModelEngine
from paceline.engine.optimizer import MOMENTS, MasterAdamW
from paceline.engine.sharding import unsharded
from paceline.engine.shards import local_part, offsets_of, spread_like
from paceline.model.identity import weights_identity
from paceline.model.loading import CausalModel
from paceline.model.lora import AdaptedModel, save_adapter
from paceline.schedules.setup import Run
from paceline.schedules.sft_setup import SftRun

AnyRun = Run | SftRun
"""A run that samples, or a supervised one."""

_NOT_OF_PROMPTS = {"eval_samples", "eval_temperature", "reward", "reward_workers", "reward_timeout_s"}
"""Settings of a task that leave its prompts as they are."""


def save(run: AnyRun) -> float:
    """Saves after the step just finished; returns the seconds the loop was blocked.

    Working weights are not stored beside float32 masters: they follow from them bit by bit.
    """
    optimizer, critic = run.trainer.optimizer, critic_of(run)
    tensors = {"masters": pieces(optimizer.masters()), "moments": pieces(optimizer.moments())}
    state: dict[str, Any] = {
        "step": run.state.step,
        "figures": run.state.figures,
        "optimizer": optimizer.state(),
        "loader": run.loader.state_dict(),
        "weight_version": run.weight_version,
        "seed": run.config.run.seed,
        "config": run.folder.config_text,
        "task": prompt_settings(run.config),
        "lora": adapter_identity(run.config),
        "weights": weights_identity(run.config.model.path, run.config.model.revision),
        "critic": None if critic is None else critic.optimizer.state(),
    }
    if critic is not None:
        tensors["critic_masters"] = pieces(critic.optimizer.masters())
        tensors["critic_moments"] = pieces(critic.optimizer.moments())
    if config_holds_back(run.config):
        state["held_back_norm"] = {
            name: engine.replicas.held_back_norm() for name, engine in engines_of(run).items()
        }
    held = [tensor for named in tensors.values() for tensor in named.values()]
    num_bytes = sum(map(held_bytes, held))
    with run.ledger.span(
        "checkpoint", cause="queue", num_bytes=num_bytes
    ):  # waits for the writer, and copies
        return run.store.save(run.state.step, tensors, state, asynchronous=run.config.checkpoint.asynchronous)


def pieces(tensors: Mapping[str, Tensor]) -> dict[str, Held]:
    """Masters or moments as a checkpoint takes them: where they are divided over ranks, this rank's piece of each."""
    return {
        name: Piece(local_part(tensor), tuple(tensor.shape), offsets_of(tensor))
        if isinstance(tensor, DTensor)
        else tensor
        for name, tensor in tensors.items()
    }


def held_bytes(held: Held) -> int:
    """Bytes of a tensor, or of this rank's piece of it."""
    tensor = held.local if isinstance(held, Piece) else held
    return tensor.numel() * tensor.element_size()


def load_optimizer(optimizer: MasterAdamW, loaded: Loaded, prefix: str, state: Mapping[str, int]) -> None:
    """Puts an optimiser back from the groups `{prefix}masters` and `{prefix}moments`; a rank reads what it holds.

    Raises:
        KeyError: a parameter of this model is missing from the checkpoint.
    """
    masters = optimizer.masters()
    moments = {f"{name}.{moment}": master for name, master in masters.items() for moment in MOMENTS}

    def read(group: str, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = loaded.like(group, pieces(targets))
        return {name: spread_like(part, targets[name]) for name, part in found.items()}

    optimizer.load(
        read(f"{prefix}masters", masters),
        read(f"{prefix}moments", moments) if state["num_applied"] else {},
        state,
    )


def resume(run: AnyRun) -> bool:
    """Continues from the newest complete checkpoint, if there is one; says which and why newer ones were passed over.

    Raises:
        ConfigError: `run.resume` is "must" and there is none, or what the run was trained on or with has changed.
    """
    with run.ledger.span("setup", "resume"):
        found = run.store.latest() if run.folder.resumes else None
        if found is None:
            if run.config.run.resume == "must":
                raise ConfigError(
                    "run.resume", "must", f"{run.folder.path} holds no complete checkpoint", "auto"
                )
            run.folder.write_config()
            return False
        for path, reason in found.skipped:
            run.display.note(f"  checkpoint {path.name} skipped: {reason}")
        loaded = run.store.load(found.path)
        if loaded.state["seed"] != run.config.run.seed:
            raise ConfigError(
                "run.seed",
                run.config.run.seed,
                "a resumed run keeps its master seed, or prompts and samples would repeat",
                str(loaded.state["seed"]),
            )
        check_adapters(run.config, loaded.state)
        changed = changed_settings(loaded.state.get("config", ""), run.folder.config_text)
        check_reference(run.config, changed, loaded.state)
        load_optimizer(run.trainer.optimizer, loaded, "", loaded.state["optimizer"])
        load_critic(run, loaded)
        for name, norm in loaded.state.get("held_back_norm", {}).items():
            engines_of(run)[name].replicas.lost_on_resume = norm
        check_prompts(run.config, loaded.state, run.loader.fingerprint)
        run.loader.load_state_dict(loaded.state["loader"])
        run.weight_version = loaded.state["weight_version"]
        run.state.step = loaded.state["step"]
        run.state.figures = loaded.state["figures"]
    run.folder.write_config()
    if changed:
        run.folder.keep_config(run.state.step, loaded.state["config"])
        run.display.note(
            f"  settings changed since: {'; '.join(f'{name}: {change}' for name, change in changed.items())}"
        )
    run.display.note(f"  resumed after step {run.state.step} from {found.path}")
    return True


def config_holds_back(config: Config) -> bool:
    """Whether replicas hold parts of gradients back, which no checkpoint keeps: their norm is counted on resume."""
    return config.train.gradient_sync != "exact"


def engines_of(run: AnyRun) -> dict[str, ModelEngine]:
    """The engines that train, by role."""
    critic = critic_of(run)
    return {"actor": run.trainer.engine, **({} if critic is None else {"critic": critic.engine})}


def critic_of(run: AnyRun) -> CriticEngine | None:
    """The run's critic; a supervised run never has one."""
    return run.critic if isinstance(run, Run) else None


def load_critic(run: AnyRun, loaded: Loaded) -> None:
    """Puts the critic back as it was saved.

    Raises:
        ConfigError: the checkpoint holds a critic and the run has none, or the other way round.
    """
    saved, critic = loaded.state.get("critic"), critic_of(run)
    if (saved is None) != (critic is None):
        held = "no critic" if saved is None else "a critic"
        rule = f"the checkpoint holds {held}, and a resumed run keeps what it was trained with"
        raise ConfigError("algorithm.advantage", run.config.algorithm.advantage, rule)
    if critic is not None and saved is not None:
        load_optimizer(critic.optimizer, loaded, "critic_", saved)


def prompt_settings(config: Config) -> dict[str, Any]:
    """What decides the training prompts of a task, as JSON holds it."""
    return config.task.model_dump(mode="json", exclude=_NOT_OF_PROMPTS)


def check_prompts(config: Config, state: Mapping[str, Any], fingerprint: str) -> None:
    """Raises `ConfigError` for every setting that made the training prompts others than the checkpoint's.

    Where none of the task has changed (a file has, say, or the checkpoint is older than its settings are kept), it is
    the loader that refuses, by the fingerprint alone.
    """
    saved = state.get("task")
    if saved is None or state["loader"]["fingerprint"] == fingerprint:
        return
    changed = []
    for name, value in prompt_settings(config).items():
        if name in saved and saved[name] != value:
            before = "null" if saved[name] is None else str(saved[name])
            rule = f"the checkpoint was written with {before}, and a resumed run keeps its training prompts"
            changed.append(ConfigError(f"task.{name}", value, rule, before))
    if changed:
        raise ConfigError.join(changed)


def check_reference(config: Config, changed: Mapping[str, Change], state: Mapping[str, Any]) -> None:
    """Raises `ConfigError` when the KL would be measured against another model than before.

    Adapters stand on their base, which `check_adapters` compares. Without a KL nothing is read from `model.path` but
    the shape: the weights come from the checkpoint.
    """
    if config.algorithm.kl_coefficient == 0.0 or config.lora.rank or begins_alike(config, state):
        return
    for name in ("model.path", "model.revision"):
        if (change := changed.get(name)) is not None:
            rule = "the KL is measured against the model that the run began with, and that was another"
            raise ConfigError(name, change.after, rule, str(change.before))


def begins_alike(config: Config, state: Mapping[str, Any]) -> bool:
    """Whether `model.path` holds the weights that the checkpoint's run began with, wherever they lie now."""
    return bool(state.get("weights") == weights_identity(config.model.path, config.model.revision))


def adapter_identity(config: Config) -> dict[str, Any] | None:
    """What a checkpoint that holds adapters alone must be put back onto; None without adapters."""
    lora = config.lora
    if not lora.rank:
        return None
    return {
        "rank": lora.rank,
        "alpha": lora.scaled_alpha,
        "target_modules": sorted(lora.target_modules),
        "base": config.model.path,
    }


def check_adapters(config: Config, state: Mapping[str, Any]) -> None:
    """Raises `ConfigError` when the checkpoint's adapters are not those of the config (or either has none)."""
    saved, wanted = state.get("lora"), adapter_identity(config)
    if saved == wanted:
        return
    if saved is None or wanted is None:
        rank = 0 if wanted is None else wanted["rank"]
        held = "weights without adapters" if saved is None else f"adapters of rank {saved['rank']}"
        raise ConfigError(
            "lora.rank", rank, f"the checkpoint holds {held}", str(saved["rank"] if saved else 0)
        )
    others = [name for name in wanted if saved[name] != wanted[name]]
    if others == ["base"] and begins_alike(config, state):
        return
    name = others[0]
    key = "model.path" if name == "base" else f"lora.{name}"
    rule = "a resumed run keeps the adapters and the base model that the checkpoint was written with"
    raise ConfigError(key, wanted[name], rule, str(saved[name]))


def export_run(run: AnyRun) -> None:
    """`export_weights` of a run's trained model. All ranks gather it, and the first writes."""
    with unsharded(run.trainer.engine.sharded) as whole:
        if run.mesh.is_first:
            export_weights(whole, run.tokenizer, run.folder.path)


def export_weights(model: CausalModel, tokenizer: PreTrainedTokenizerBase, run_dir: Path) -> None:
    """Final weights in Hugging Face format in `export/`; adapters are merged there, and alone in `adapter/`."""
    merged = model.merged_state_dict() if isinstance(model, AdaptedModel) else None
    export_hf(model.module, tokenizer, run_dir / "export", merged)
    if isinstance(model, AdaptedModel):
        with replaced_folder(run_dir / "adapter") as aside:
            save_adapter(model, aside)
