"""Fused or exact decoder layers for the models of a run, where its settings and ranks allow them."""

from paceline.config import Config
from paceline.model.exact import make_exact
from paceline.model.fused import fuse_for_device
from paceline.model.loading import CausalModel


def finish_model(config: Config, model: CausalModel) -> None:
    """Products and layers of a policy or its reference, in place: exact ones (`rollout.exact`), else fused ones."""
    if config.rollout.exact:
        make_exact(model)
    else:
        fuse_model(config, model)


def fuse_model(config: Config, model: CausalModel) -> None:
    """Fuses the layers of a model of any role, in place, with `train.preset: fast` on a device with kernels for it.

    Adapters must be in the model before.
    """
    # tensor parallelism hooks into the linear layers, which fused layers go round
    if config.train.preset == "fast" and config.cluster.tensor_parallel_size == 1:
        fuse_for_device(model.module, model.device, adjacent=config.cluster.num_devices == 1)
