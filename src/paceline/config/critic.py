"""What follows from the settings for the critic: whether there is one, its model, its optimiser and its budgets."""

from paceline.config.schema import BatchSection, Config, ModelSection, OptimizerSection, TrainSection


def has_critic(config: Config) -> bool:
    """Whether the algorithm's advantages come from a value model."""
    return config.algorithm.advantage == "gae"


def critic_model(config: Config) -> ModelSection:
    """The model section the critic is loaded by: the actor's, with the path that `critic` names."""
    critic = config.critic
    if critic.path is None:
        return config.model
    return config.model.model_copy(update={"path": critic.path, "revision": critic.revision})


def critic_train(config: Config) -> TrainSection:
    """The critic's training settings: its own optimiser, and what it shares with the actor."""
    return config.train.model_copy(
        update=config.critic.model_dump(include=set(OptimizerSection.model_fields))
    )


def critic_batch(config: Config) -> BatchSection:
    """The critic's batch settings: its own token budgets, the actor's layout."""
    budgets = {
        "token_budget": config.critic.token_budget or config.batch.token_budget,
        "forward_token_budget": critic_forward_budget(config),
    }
    return config.batch.model_copy(update=budgets)


def critic_forward_budget(config: Config) -> int:
    """Tokens of a micro-batch when the critic only estimates values."""
    critic, batch = config.critic, config.batch
    if critic.forward_token_budget is not None:
        return critic.forward_token_budget
    if critic.token_budget is not None:
        return 2 * critic.token_budget
    return batch.forward_token_budget or 2 * batch.token_budget


def critic_epochs(config: Config) -> int:
    """Passes of the critic over a rollout's mini-batches."""
    return config.critic.num_epochs or config.batch.num_epochs


def num_actor_steps(config: Config) -> int:
    """Steps in which the actor is updated: all, but for those that the critic has to itself."""
    return config.run.num_steps - (config.critic.pretrain_steps if has_critic(config) else 0)


def mini_batches_per_rollout(config: Config) -> int:
    """Mini-batches a step's prompts are divided into."""
    batch = config.batch
    return batch.num_prompts // (batch.mini_batch_prompts or batch.num_prompts)


def num_critic_updates(config: Config) -> int:
    """Optimiser updates of the critic in the whole run."""
    return config.run.num_steps * mini_batches_per_rollout(config) * critic_epochs(config)
