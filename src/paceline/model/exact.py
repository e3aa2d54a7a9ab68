"""Exact mode: sampled and scored log-probs of the same tokens are the same bits (`rollout.exact`)."""

from paceline.config.errors import ConfigError
from paceline.model.attention import EXACT_ATTENTION_NAME
from paceline.model.exact_products import use_tiled_products
from paceline.model.loading import CausalModel


def make_exact(model: CausalModel) -> None:
    """Gives a model, in place, products and attention whose every row is independent of the rows beside it.

    Raises:
        ConfigError: the model routes tokens to experts; how many tokens an expert gets depends on the batch.
    """
    if model.shape.num_experts:
        raise ConfigError(
            "rollout.exact",
            True,
            f"is not offered for a mixture of experts ({model.family.model_type})",
            "false",
        )
    use_tiled_products(model.module)
    model.module.set_attn_implementation(EXACT_ATTENTION_NAME)
