"""Settings of rollout engines that hold a copy of the weights (vLLM, SGLang), and of several engines at once.

Names are those of vLLM's own engine arguments, with vLLM's meaning. `config/engine_rules.py` refuses what cannot work,
`config/engine_advice.py` says what works and is slow.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.config.section import NonNegative, Positive, PositiveFloat, Section

Share = Annotated[float, Field(gt=0.0, le=1.0)]


class VllmSection(Section):
    """rollout.engine: vllm; refused with any other engine."""

    mode: Literal["child", "colocated", "server"] = "child"
    """Where vLLM runs. child: a process that the run starts, with `python`; colocated: in the trainer's own process,
    on its device, asleep while the trainer updates; server: an OpenAI-compatible server over HTTP, started with
    `python` or already running at `addresses`."""
    python: str | None = None
    """Python that has vLLM installed, where the run's own has not (child and server). Default: the run's own."""
    addresses: tuple[str, ...] = ()
    """Servers that run already (http://host:port), one per replica, started with paceline's worker extension
    (docs/rollout-engines.md). Empty: the run starts its own."""
    gpu_memory_utilization: Share = 0.5
    """Share of a device's memory for weights, activations and KV cache together. 0.5 to 0.7 where the trainer keeps its
    memory on the same device; up to 0.9 on devices of its own."""
    max_num_seqs: Positive = 256
    """Samples decoded at the same time."""
    max_num_batched_tokens: Positive = 8192
    """Tokens of one engine step, prompts and decoded ones together. Above 2048 for throughput."""
    tensor_parallel_size: Positive = 1
    """Devices that share one copy of the weights. The smallest that fits: more replicas sample faster than more
    devices per replica."""
    cudagraph_capture_sizes: tuple[Positive, ...] = ()
    """Batch sizes captured as CUDA graphs; empty: vLLM's own list. Each takes memory beside gpu_memory_utilization's
    cache and start-up time; sizes above max_num_seqs are never used."""
    enforce_eager: bool = False
    """Neither compile nor capture: starts sooner, decodes slower."""
    enable_prefix_caching: bool = True
    """Keep computed prompts: a group's prompt is computed once. Emptied with every load of weights."""
    enable_chunked_prefill: bool = True
    """Long prompts are computed in pieces beside decoding; without it a prompt must fit into max_num_batched_tokens."""
    block_size: Positive | None = None
    """Tokens of one page of the KV cache; None: vLLM's choice."""
    kv_cache_dtype: str = "auto"
    """Type of keys and values; auto: that of the weights. fp8 halves the cache and moves log-probs."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of vLLM's copy of the weights; auto: the trainer's."""
    async_scheduling: bool | None = None
    """Plan the next step while the device computes; None: vLLM's choice."""
    kv_cache_gb: PositiveFloat = 2.0
    """On a CPU: memory of the KV cache in GiB (vLLM's VLLM_CPU_KVCACHE_SPACE); a device takes gpu_memory_utilization's
    share instead."""
    sleep_level: Literal[0, 1, 2] = 1
    """What a colocated or shared device is given back while the trainer updates: 0 nothing, 1 the KV cache (weights go
    to host memory), 2 both for good, the weights coming back with the next load. A CPU build has no sleep mode."""
    weight_transfer: Literal["auto", "file", "cuda_ipc"] = "auto"
    """How weights reach vLLM: file (safetensors in shared memory) or cuda_ipc (handles of the trainer's own tensors,
    same device only; unverified). auto: file; colocated mode hands tensors over directly."""
    weight_dir: str = "/dev/shm"
    """Folder for the files of weight_transfer: file; memory-backed is fastest, and must hold the weights once."""
    verify_logprobs: Literal["every", "first", "off"] = "first"
    """Compare vLLM's log-probs of a fixed probe with the trainer's after a load: every load, each process's first
    change, or never. The fingerprints of the weights are compared after every load in any case."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further vLLM engine arguments by vLLM's names; none that has a key of its own here."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the child or server, such as VLLM_ATTENTION_BACKEND."""


class SglangSection(Section):
    """rollout.engine: sglang; refused with any other engine. Unverified: tested against SGLang's documented API, not
    against a running server."""

    addresses: tuple[str, ...] = ()
    """Servers (http://host:port), one per replica."""
    weight_dir: str = "/dev/shm"
    """Folder that trainer and servers both see, for weights in transit; must hold them once."""
    sleep: bool = True
    """Ask the server to release its memory while the trainer updates (needs --enable-memory-saver there)."""


class ReplicasSection(Section):
    """Several rollout engines behind one router, and how long one may be silent."""

    affinity_margin: NonNegative = 8
    """A sample goes where its group's prompt has been computed, unless that replica has so many more unfinished samples
    than the least busy one."""
    max_queued: Positive | None = None
    """Unfinished samples handed to one replica; the rest wait in the global queue for whichever is free first. Default:
    twice what a replica runs at a time."""
    timeout_s: PositiveFloat = 600.0
    """Seconds without a sign of life from a replica with work, or of nothing but refusals, after which it counts as
    dead; its samples are done again elsewhere."""
    start_timeout_s: PositiveFloat = 900.0
    """Seconds a replica may take to start."""
    max_restarts: NonNegative = 2
    """How often, in a whole run, a dead replica is started anew; with none left alive the run ends."""
    devices: tuple[NonNegative, ...] = ()
    """Devices of the replicas in order, by the numbers torch shows them under: one each, or
    rollout.vllm.tensor_parallel_size each. Empty: the trainer's own device, shared with it."""
    num_threads: NonNegative = 1
    """CPU threads of a replica that is a process of its own; 0 = the library's choice."""
