"""From the settings to what the replicas of a model do."""

from paceline.config.schema import TrainSection
from paceline.engine.gradient_sync.compression import Compressor, Int8, TopK
from paceline.engine.gradient_sync.replicas import CompressedSync, LocalSteps
from paceline.engine.mesh import RankMesh

DEFAULT_FRACTION = 0.01
"""Share of a gradient's elements that top-k sends where `train.gradient_sync_fraction` does not say."""


def replica_sync_of(train: TrainSection, mesh: RankMesh) -> CompressedSync | LocalSteps | None:
    """None is HSDP's own exact all-reduce: no replicas, or no other way asked for."""
    if mesh.sizes.replicate == 1 or mesh.parameter_mesh is None:
        return None
    compressor = compressor_of(train)
    if compressor is None and train.gradient_sync_every == 1:
        return None
    group = mesh.parameter_mesh["replicate"].get_group()
    if compressor is None:
        return LocalSteps(train.gradient_sync_every, group)
    return CompressedSync(compressor, group)


def compressor_of(train: TrainSection) -> Compressor | None:
    """What the gradient is compressed with; None: not at all."""
    fraction = train.gradient_sync_fraction or DEFAULT_FRACTION
    if train.gradient_sync == "exact":
        return None
    if train.gradient_sync == "int8":
        return Int8()
    return TopK(fraction, in_int8=train.gradient_sync == "topk_int8")
