"""How the ranks of a run are divided: mesh sizes from the `cluster` section, and which sizes a model allows.

num_devices = replicate_size x shard_size x sequence_parallel_size x tensor_parallel_size
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.config.errors import ConfigError
from paceline.config.reward_schema import ModelSource
from paceline.config.schema import ClusterSection, Config


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """Ranks along every mesh axis, outermost first."""

    replicate: int = 1
    shard: int = 1
    sequence_parallel: int = 1
    tensor_parallel: int = 1

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.num_data * self.sequence_parallel * self.tensor_parallel

    def describe(self) -> str:
        """The axes in words."""
        return (
            f"replicate {self.replicate} x shard {self.shard} x sequence parallel {self.sequence_parallel} x "
            f"tensor parallel {self.tensor_parallel}"
        )

    @property
    def num_data(self) -> int:
        """Ways in which samples are divided."""
        return self.replicate * self.shard


def mesh_sizes(
    cluster: ClusterSection,
    *,
    sequence_parallel_size: int | None = None,
    key: str = "cluster.sequence_parallel_size",
) -> MeshSizes:
    """Sizes of the mesh axes; `shard_size` left open takes the ranks that the others leave.

    `sequence_parallel_size` replaces the cluster's for a role that has its own, `key` is then its setting: such a
    role keeps the tensor-parallel size, and what its sequence-parallel size leaves are its data ranks.

    Raises:
        ConfigError: a size does not divide the ranks; the nearest that does is named.
    """
    own = sequence_parallel_size is not None
    sequence = sequence_parallel_size or cluster.sequence_parallel_size
    left = _divide(
        cluster.num_devices,
        "cluster.num_devices",
        cluster.tensor_parallel_size,
        "cluster.tensor_parallel_size",
    )
    left = _divide(left, "the ranks tensor parallelism leaves,", sequence, key)
    replicate = cluster.replicate_size
    shard_room = _divide(
        left, "the ranks tensor and sequence parallelism leave,", replicate, "cluster.replicate_size"
    )
    shard = cluster.shard_size
    if shard is not None and shard != shard_room and not own:
        rule = (
            f"times replicate_size {replicate} x sequence_parallel_size {sequence} x tensor_parallel_size "
            f"{cluster.tensor_parallel_size} must be cluster.num_devices = {cluster.num_devices}"
        )
        raise ConfigError("cluster.shard_size", shard, rule, str(shard_room))
    return MeshSizes(replicate, shard_room, sequence, cluster.tensor_parallel_size)


Role = Literal["actor", "reference", "critic", "reward"]

ROLES: tuple[Role, ...] = ("actor", "reference", "critic", "reward")


def role_sizes(config: Config, role: Role = "actor") -> MeshSizes:
    """Sizes of the mesh that a role's model runs on.

    Raises:
        ConfigError: see `mesh_sizes`.
    """
    own = {
        "reference": (
            config.cluster.reference_sequence_parallel_size,
            "cluster.reference_sequence_parallel_size",
        ),
        "critic": (config.critic.sequence_parallel_size, "critic.sequence_parallel_size"),
        "reward": (config.reward.sequence_parallel_size, "reward.sequence_parallel_size"),
    }
    if role not in own or own[role][0] is None:
        return mesh_sizes(config.cluster)
    size, key = own[role]
    return mesh_sizes(config.cluster, sequence_parallel_size=size, key=key)


def check_model_heads(config: Config) -> None:
    """`check_heads` of every role whose model lies in a local folder, before anything of it is loaded.

    Raises:
        ConfigError: see `check_heads`.
    """
    paths: dict[Role, str] = {"actor": config.model.path, "reference": config.model.path}
    keys: dict[Role, str] = {
        "actor": "cluster.sequence_parallel_size",
        "reference": "cluster.reference_sequence_parallel_size",
        "critic": "critic.sequence_parallel_size",
        "reward": "reward.sequence_parallel_size",
    }
    if config.algorithm.advantage == "gae":
        paths["critic"] = config.critic.path or config.model.path
    models = list(paths.items())
    models += [("reward", s.path) for s in config.reward.sources.values() if isinstance(s, ModelSource)]
    for role, path in models:
        heads = stated_heads(path)
        if heads is not None:
            check_heads(role_sizes(config, role), *heads, key=keys[role])


def stated_heads(model_path: str) -> tuple[int, int] | None:
    """Heads and kv heads of a local model folder's config.json, or None where there is none to read."""
    path = Path(model_path).expanduser() / "config.json"
    if not model_path or not path.is_file():
        return None
    stated = json.loads(path.read_text(encoding="utf-8"))
    holder = stated.get("text_config") or stated
    heads = holder.get("num_attention_heads")
    return None if heads is None else (int(heads), int(holder.get("num_key_value_heads") or heads))


def allowed_sequence_parallel_sizes(num_heads: int, num_kv_heads: int, limit: int) -> tuple[int, ...]:
    """Sizes up to `limit` at which every rank holds whole query heads and the kv heads these attend to.

    The size divides the query heads, and it divides the kv heads or is a multiple of them; kv heads are repeated
    where there are fewer than ranks.
    """
    return tuple(
        size
        for size in range(1, limit + 1)
        if num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
    )


def allowed_tensor_parallel_sizes(num_heads: int, num_kv_heads: int, limit: int) -> tuple[int, ...]:
    """Sizes up to `limit` that divide query heads and kv heads: weights of a kv head are not repeated."""
    return tuple(size for size in range(1, limit + 1) if num_heads % size == 0 and num_kv_heads % size == 0)


def check_heads(
    sizes: MeshSizes,
    num_heads: int,
    num_kv_heads: int,
    *,
    key: str = "cluster.sequence_parallel_size",
) -> None:
    """Whether a model with these heads can be divided so.

    Raises:
        ConfigError: it cannot; all sizes that can are named.
    """
    tensor = sizes.tensor_parallel
    tensor_sizes = allowed_tensor_parallel_sizes(num_heads, num_kv_heads, num_heads)
    if tensor not in tensor_sizes:
        rule = f"must divide the model's {num_heads} heads and {num_kv_heads} kv heads"
        raise ConfigError("cluster.tensor_parallel_size", tensor, rule, _listed(tensor_sizes))
    heads, kv_heads = num_heads // tensor, num_kv_heads // tensor
    allowed = allowed_sequence_parallel_sizes(heads, kv_heads, heads)
    if sizes.sequence_parallel not in allowed:
        rule = (
            f"must divide the {heads} heads that a tensor-parallel rank holds, and divide its {kv_heads} kv heads or "
            "be a multiple of them"
        )
        raise ConfigError(key, sizes.sequence_parallel, rule, _listed(allowed))


def _divide(ranks: int, what: str, size: int, key: str) -> int:
    if ranks % size == 0:
        return ranks // size
    divisors = [candidate for candidate in range(1, ranks + 1) if ranks % candidate == 0]
    nearest = min(divisors, key=lambda candidate: (abs(candidate - size), candidate))
    raise ConfigError(key, size, f"must divide {what} {ranks}", str(nearest))


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
