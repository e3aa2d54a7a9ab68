"""What works and is probably slow, or short of memory: advice, printed at the start and by `--dry-run`, never refused.

Sources: vLLM's own tuning guide, and the published tuning guides of RL systems that put vLLM beside a trainer.
"""

from dataclasses import dataclass

from paceline.config.decisions import num_engines_beside_the_trainer, sleeps_between_rollouts
from paceline.config.schema import Config

COLOCATED_SHARE = (0.5, 0.7)
"""Share of a device's memory for vLLM beside a trainer that keeps its memory there."""

OWN_DEVICE_SHARE = 0.8
FEW_BATCHED_TOKENS = 2048
GRAPH_BYTES = 100 * 2**20
"""Rough memory of one captured batch size with its workspaces; large models take several times as much."""

MANY_GRAPHS = 64


@dataclass(frozen=True, slots=True)
class Advice:
    """`key` is better set otherwise, and why."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


def engine_advice(
    config: Config, *, on_cpu: bool, weight_bytes: int | None = None, device_bytes: int | None = None
) -> list[Advice]:
    """Advice for the rollout engine; with sizes, also on what fits."""
    if config.rollout.engine != "vllm":
        return []
    found = [*_batching(config), *_cache(config)]
    if not on_cpu:
        found += [*_memory(config), *_graphs(config), *_tensor_size(config, weight_bytes, device_bytes)]
    return found


def _batching(config: Config) -> list[Advice]:
    vllm = config.rollout.vllm
    found = []
    if vllm.max_num_batched_tokens <= FEW_BATCHED_TOKENS:
        text = (
            f"{vllm.max_num_batched_tokens} tokens a step cut prompts into small pieces; above {FEW_BATCHED_TOKENS} "
            "for throughput"
        )
        found.append(Advice("rollout.vllm.max_num_batched_tokens", text))
    samples = config.batch.num_prompts * config.batch.num_samples // config.cluster.num_devices
    per_replica = samples // config.rollout.num_replicas
    if per_replica >= 2 * vllm.max_num_seqs:
        text = (
            f"{per_replica} samples of a step go through {vllm.max_num_seqs} at a time; more at a time decode faster "
            "while the cache holds them"
        )
        found.append(Advice("rollout.vllm.max_num_seqs", text))
    return found


def _cache(config: Config) -> list[Advice]:
    if config.rollout.vllm.enable_prefix_caching or config.batch.num_samples == 1:
        return []
    text = f"every prompt is computed {config.batch.num_samples} times, once for each sample of its group"
    return [Advice("rollout.vllm.enable_prefix_caching", text)]


def _memory(config: Config) -> list[Advice]:
    vllm = config.rollout.vllm
    key = "rollout.vllm.gpu_memory_utilization"
    share = vllm.gpu_memory_utilization
    if num_engines_beside_the_trainer(config) == 0:
        if share < OWN_DEVICE_SHARE:
            return [Advice(key, f"{share} leaves memory of a device of its own unused; up to 0.9")]
        return []
    low, high = COLOCATED_SHARE
    if sleeps_between_rollouts(config) or low <= share <= high:
        return []
    if share > high:
        otherwise = "devices other than 0" if config.rollout.replicas.devices else "sleep_level: 1"
        text = (
            f"{share} beside a trainer whose memory stays on the device, for a vLLM that never sleeps; {low} to "
            f"{high}, or {otherwise}"
        )
    else:
        text = (
            f"{share} leaves little for the KV cache, so that samples wait or are preempted; {low} to {high}"
        )
    return [Advice(key, text)]


def _graphs(config: Config) -> list[Advice]:
    vllm = config.rollout.vllm
    if vllm.enforce_eager:
        return [
            Advice(
                "rollout.vllm.enforce_eager", "every decoding step waits for the host; false captures graphs"
            )
        ]
    sizes = vllm.cudagraph_capture_sizes
    if len(sizes) > MANY_GRAPHS:
        text = (
            f"{len(sizes)} graphs take about {len(sizes) * GRAPH_BYTES / 2**30:.0f} GiB and start-up time; a size "
            "between two captured ones is padded to the larger"
        )
        return [Advice("rollout.vllm.cudagraph_capture_sizes", text)]
    if sizes and max(sizes) < vllm.max_num_seqs:
        text = f"batches above {max(sizes)} run without a graph, and max_num_seqs is {vllm.max_num_seqs}"
        return [Advice("rollout.vllm.cudagraph_capture_sizes", text)]
    return []


def _tensor_size(config: Config, weight_bytes: int | None, device_bytes: int | None) -> list[Advice]:
    vllm = config.rollout.vllm
    size = vllm.tensor_parallel_size
    if size == 1 or weight_bytes is None or device_bytes is None:
        return []
    smallest = next(
        (n for n in (1, 2, 4, 8) if weight_bytes / n <= 0.5 * vllm.gpu_memory_utilization * device_bytes),
        size,
    )
    if smallest >= size:
        return []
    text = (
        f"{weight_bytes / 2**30:.1f} GiB of weights leave half of vLLM's share to the cache with {smallest} already; "
        f"{size // smallest} times as many replicas sample faster than {size} devices each"
    )
    return [Advice("rollout.vllm.tensor_parallel_size", text)]
