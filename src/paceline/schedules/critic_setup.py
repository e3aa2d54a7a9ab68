"""The critic of a run: loaded, checked against the actor it judges, and put on an engine of its own."""

from paceline.config import Config, ConfigError
from paceline.config.critic import critic_model, has_critic
from paceline.data.seeds import child_seed
from paceline.engine.critic import CriticEngine
from paceline.model.packing_probe import probe_value_packing
from paceline.model.value_head import ValueModel, load_value_model
from paceline.schedules.fused_layers import fuse_model
from paceline.schedules.place import Place
from paceline.telemetry.ledger import Ledger


def open_critic(
    config: Config, place: Place, ledger: Ledger, num_token_ids: int, longest_sample: int
) -> CriticEngine | None:
    """The critic, or None where the algorithm has none.

    `num_token_ids` is the size of the actor's tokenizer, `longest_sample` the most tokens a sample can have.

    Raises:
        ConfigError: the critic's model cannot be loaded, or cannot read what the actor writes.
    """
    if not has_critic(config):
        return None
    key = "model.path" if config.critic.path is None else "critic.path"
    model = load_value_model(critic_model(config), place.device, child_seed(config.run.seed, "critic"), key)
    _check_reads_the_actor(model, config, num_token_ids, longest_sample)
    fuse_model(config, model)
    if config.model.verify_packing:
        probe_value_packing(model, key)
    return CriticEngine(model, config, ledger, place.mesh_of("critic"))


def _check_reads_the_actor(
    model: ValueModel, config: Config, num_token_ids: int, longest_sample: int
) -> None:
    vocabulary = model.module.config.get_text_config().vocab_size
    if vocabulary < num_token_ids:
        rule = f"has {vocabulary} token ids, and the actor's tokenizer has {num_token_ids}; both must read the same ids"
        raise ConfigError("critic.path", config.critic.path, rule, "null, which starts from model.path")
    if model.max_context < longest_sample:
        rule = f"reads at most {model.max_context} tokens, and a sample can have {longest_sample}"
        raise ConfigError("critic.path", config.critic.path, rule, "null, which starts from model.path")
