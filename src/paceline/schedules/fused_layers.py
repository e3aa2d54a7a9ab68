"""Fused decoder layers for the models of a run, where its settings and ranks allow them."""

from paceline.config import Config
from paceline.model.fused import fuse_for_device
from paceline.model.loading import CausalModel


def fuse_model(config: Config, model: CausalModel) -> None:
    """Fuses the layers of a model of any role, in place, with `train.preset: fast` on a device with kernels for it.

    Adapters must be in the model before.
    """
    # tensor parallelism hooks into the linear layers, which fused layers go round
    if config.train.preset == "fast" and config.cluster.tensor_parallel_size == 1:
        fuse_for_device(model.module, model.device, adjacent=config.cluster.num_devices == 1)
