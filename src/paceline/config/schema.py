"""Every setting of a run: name, type, default, unit, meaning. Torch-free, so that a laptop can check a recipe.

One model per section; the sections and their order are those of docs/architecture.md. A field's description is
the sentence `paceline config --explain` prints, so it says what the setting does, its unit and when it acts.
Rules that span several fields live in `config/rules.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from paceline.config.agent import AgentSection
from paceline.config.engine_schema import ReplicasSection, SglangSection, VllmSection
from paceline.config.reward_schema import RewardSection
from paceline.config.section import NonNegative, NonNegativeFloat, Positive, Section


class RunSection(Section):
    name: str = "run"
    """Name of the run; its folder is `dir/name`."""
    dir: str = "runs"
    """Folder that holds the runs' folders."""
    seed: NonNegative = 0
    """Master seed: data order, sampling and initialisation all derive from it."""
    num_steps: Positive = 100
    """Steps (rollout-to-update cycles) to train in all; a resumed run stops at the same number."""
    eval_every: NonNegative = 0
    """Evaluate after every so many steps, in addition to before the first and after the last; 0 = those two only."""
    save_samples_every: NonNegative = 1
    """Write the step's samples to samples/step{n}.jsonl every so many steps; 0 = never."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue from the newest complete checkpoint in the run's folder if there is one; never: refuse a
    folder that already holds a run; must: refuse to start without a checkpoint."""


class ModelSection(Section):
    path: str = ""
    """Hugging Face id or local folder of the model to train."""
    revision: str | None = None
    """Revision of a Hugging Face id."""
    tokenizer_path: str | None = None
    """Tokenizer to use when it is not beside the model."""
    chat_template: str | None = None
    """Path of a Jinja chat template, used in place of the tokenizer's own."""
    dtype: Literal["auto", "native", "float32", "bfloat16"] = "auto"
    """Working weights and compute. auto: float32 on CPU, bfloat16 on accelerators; native: bfloat16 wherever the
    device has matrix units for it (an AMX CPU included), else float32. Masters and moments are always float32."""
    max_context: Positive | None = None
    """Longest prompt plus response in tokens; default: what the model's config states."""
    trust_remote_code: bool = False
    """Allow a model repository to run its own Python code."""
    random_weights: bool = False
    """Build the model from its config with random weights (benchmarks and tests)."""
    verify_packing: bool = True
    """Before training, compare packed with one-by-one log-probs on the loaded model and refuse if they differ."""


class LoraSection(Section):
    """Low-rank adapters (LoRA). With them, only adapter parameters are trained, held by the optimiser and saved."""

    rank: NonNegative = 0
    """Rank of the adapters; 0 = none, all weights are trained."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The adapter's product is scaled by alpha / rank; default: twice the rank."""
    target_modules: tuple[str, ...] = ()
    """Linear layers that get an adapter, by the last part of their name (q_proj, down_proj); empty: all of the model's
    layers, the output head excepted."""
    dropout: NonNegativeFloat = 0.0
    """Adapter dropout; anything but 0 is refused: sampled, old and new log-probs must come from one function."""

    @property
    def scaled_alpha(self) -> float:
        """`alpha`, or its default."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


class TaskSection(Section):
    name: str | None = None
    """A reasoning-gym task by name, such as `word_sorting`; exclusive with `path`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reasoning-gym task, passed to its config."""
    size: Positive = 4096
    """How many training prompts to draw from a reasoning-gym task."""
    path: str | None = None
    """A .jsonl or .parquet file (or a Hugging Face dataset folder of them) with one prompt per row."""
    eval_path: str | None = None
    """The held-out prompts, in the same format; default: `eval_size` rows split off deterministically."""
    eval_size: NonNegative = 64
    """Number of held-out prompts scored before and after training; 0 = no evaluation."""
    eval_samples: Positive = 1
    """Completions per held-out prompt in an evaluation."""
    eval_temperature: NonNegativeFloat = 1.0
    """Sampling temperature of the evaluation; 0 = greedy."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    answer_key: str = "answer"
    """Column with the reference answer, handed to the reward function."""
    system_prompt: str | None = None
    """System message put before every prompt."""
    num_examples: NonNegative = 0
    """Worked examples shown in every prompt as earlier chat turns, drawn once and the same for all prompts."""
    instruction: str | None = None
    """Sentence appended to every question."""
    use_chat_template: bool = True
    """Render prompts with the chat template; false: the prompt text is tokenised as it is."""
    reward: str = "auto"
    """`module:function`, a built-in name (exact_match, reasoning_gym, reasoning_gym_strict, math), the https address of
    a scoring service, or auto: the task's own scorer for a reasoning-gym task, exact_match for a file with answers.
    Reward models, judges and several rewards at once are in section `reward`."""
    reward_workers: Positive = 2
    """Worker processes that run the reward function."""
    reward_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds after which a scoring is killed and counted as a timeout."""
    shuffle: bool = True
    """Shuffle prompts every epoch, from the master seed."""
    overlong_prompts: Literal["refuse", "drop"] = "refuse"
    """A prompt that leaves no room for a response: refuse the run, or drop the prompt and count it."""


AlgorithmName = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "dapo", "gspo", "cispo", "ppo"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


class AlgorithmSection(Section):
    """Fields left at None take the value the named algorithm publishes (`config/presets.py`)."""

    name: AlgorithmName = "grpo"
    """Algorithm; sets the defaults of the fields below."""
    advantage: Literal["group_norm", "group_center", "leave_one_out", "batch_whiten", "gae"] | None = None
    """How rewards become advantages; see algorithms/advantages.py. gae (algorithms/gae.py) trains a critic, which has
    a section of its own."""
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """gae: discount per response token; 1 = none."""
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """gae: weight of later tokens' errors; 1 = the rewards that came (no bias, most variance), 0 = one-step errors."""
    whiten_advantages: bool = True
    """gae: bring the advantages of a step's loss tokens, over all devices, to mean 0 and standard deviation 1."""
    value_clip: NonNegativeFloat = 0.2
    """gae: the critic's loss holds a value that has moved further than this, in units of reward, since the rollout;
    0 = off."""
    std_floor: Annotated[float, Field(gt=0)] = 1e-3
    """Groups (or batches) whose reward standard deviation is below this are not divided by it: advantage 0.
    The same for a step's advantages where gae whitens them."""
    loss: Literal["clip", "gspo", "cispo"] | None = None
    """Policy loss; see algorithms/losses/."""
    clip_low: Annotated[float, Field(ge=0.0)] | None = None
    """Lower clip: the ratio is clipped at 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0.0)] | None = None
    """Upper clip: the ratio is clipped at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bound c of dual clipping for negative advantages; None = off."""
    aggregation: Aggregation | None = None
    """How token losses become one number; the denominator is global."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL to the reference model; 0 = no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator (Schulman 2020); bounded at `kl_cap` with a finite gradient."""
    kl_cap: Annotated[float, Field(gt=0)] = 10.0
    """Bound on the per-token KL estimate."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Add the KL to the loss, or subtract it from the reward."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus; 0 = entropy is reported without a graph."""
    old_logprob: Literal["auto", "recompute", "rollout", "current"] = "auto"
    """Where the old log-probs come from; auto: current (detached) when each rollout gets exactly one update, the
    sampled ones when the engine shares the trainer's weights, else a recomputation."""
    mask_truncated: bool = False
    """Leave samples that hit the token limit out of the loss (and out of its denominator)."""
    overlong_cache: NonNegative | None = None
    """Soft over-long penalty: from `max_new_tokens - overlong_cache` tokens on, the reward falls linearly to -1 at
    the limit; 0 = off."""
    dynamic_sampling: bool | None = None
    """Drop groups whose rewards are all equal and sample new prompts in their place."""
    max_generations: Positive = 10
    """Dynamic sampling stops after so many rollouts of one step and trains on what it has."""


AUTO_TOKEN_BUDGET = 0
"""How `auto` reads in a config whose run has not begun: no number yet. A run replaces it before anything uses it."""


def _budget_of_a_word(value: Any) -> Any:
    if value == "auto":
        return AUTO_TOKEN_BUDGET
    if isinstance(value, int) and not isinstance(value, bool) and value <= AUTO_TOKEN_BUDGET:
        raise ValueError("must be at least 1, or auto")
    return value


def _word_of_a_budget(value: int) -> int | str:
    return "auto" if value == AUTO_TOKEN_BUDGET else value


TokenBudget = Annotated[
    NonNegative,
    BeforeValidator(_budget_of_a_word),
    PlainSerializer(_word_of_a_budget, return_type=int | str),
]


def _on_or_off(value: Any) -> Any:
    """A switch is written true or false in YAML."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class BatchSection(Section):
    num_prompts: Positive = 16
    """Prompts per step, over all devices."""
    num_samples: Positive = 8
    """Samples per prompt (the group size)."""
    mini_batch_prompts: Positive | None = None
    """Prompts per optimiser update, over all devices; default: num_prompts, one update per rollout."""
    num_epochs: Positive = 1
    """Passes over a rollout's mini-batches."""
    token_budget: TokenBudget = 8192
    """Strict upper bound on the tokens of one micro-batch per device when training. auto: the largest that the memory
    estimate allows on the device, corrected at the start by one probe of forward and backward on an accelerator."""
    forward_token_budget: Positive | None = None
    """The same for forward-only passes; default: twice token_budget."""
    layout: Literal["packed", "padded"] = "packed"
    """packed: sequences in one row with variable-length attention; padded: batch x length."""
    share_prefixes: Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_or_off)] = "auto"
    """Packed layout: lay a token prefix shared by samples of one micro-batch out once; exact. auto: where the predicted
    saving exceeds what sharing costs; the decision is printed when a run starts. true and false are read as on and
    off."""
    skip_zero_advantage: bool = True
    """Leave samples whose advantage is zero out of the forward and backward pass where neither KL nor entropy is in
    the loss: their gradient is exactly zero. They stay in every denominator, and are counted."""
    pad_to: Literal["micro_batch", "bucket", "mini_batch"] = "micro_batch"
    """Padded layout: width of a micro-batch. micro_batch: its own longest sample; bucket: that, rounded up to one of a
    few widths; mini_batch: the longest sample of the mini-batch over all ranks. Fewer widths are fewer shapes for
    kernels that plan or compile for each, and more padding; the result is the same."""
    buckets_per_doubling: Literal[1, 2, 4, 8, 16] | None = None
    """batch.pad_to: bucket: widths between a power of two and the next (default 4: at most a quarter of a row is
    padding). The token budget is the last bucket."""
    pad_length: Positive | None = None
    """Padded layout: every row this wide, in tokens; a longer sample is an error."""
    pad_rows: Positive | None = None
    """Padded layout: every micro-batch has this many rows, empty ones among them, or as many as the token budget holds
    at its width; default: as many as there are samples."""
    pack_multiple: Positive = 1
    """Packed layout: rows are filled up with padding to a multiple of so many tokens (the token budget being the last),
    so that compiled kernels meet few lengths. Nothing attends to the padding; tokens/padding counts it."""
    overlong: Literal["refuse", "own_micro_batch"] = "refuse"
    """A sample longer than the budget: refuse at start (from the possible maximum), or give it a micro-batch of
    its own and count it."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether shared prefixes are laid out once; "auto" that nobody has decided (no run, no prompts) means yes."""
        return self.share_prefixes != "off"


class RolloutSection(Section):
    engine: Literal["native", "vllm", "sglang"] = "native"
    """Engine that generates. native runs on the trainer's own parameters; vllm and sglang hold a copy, loaded after
    every update (docs/rollout-engines.md)."""
    num_replicas: Positive = 1
    """Rollout engines behind one router, for each training process; native ones are then processes of their own, with a
    copy of the weights each."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; scoring and training use the same."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus mass; training refuses anything but 1, because scored and sampled distributions would differ."""
    max_new_tokens: Positive = 256
    """Longest response in tokens, the end token included."""
    max_running: Positive = 128
    """Samples decoded at the same time (slots of the KV cache) per device."""
    cache: Literal["auto", "slots", "paged"] = "auto"
    """KV cache of the native engine: one slot of full length per sample, or pages that samples of a prompt share and
    that are taken as samples grow. auto: paged on CUDA, slots on a CPU."""
    speculation: Literal["off", "auto", "on"] = "off"
    """Let a sample take several tokens in a round where what it, its prompt or the prompt's last samples said before
    tells them in advance; every token is still drawn from the model's own distribution. auto: while that is measured
    to be faster, so that rounding may depend on timing unless rollout.exact is set; on: always. Needs pages."""
    draft_tokens: Positive = 8
    """rollout.speculation: most tokens told in advance per sample and round."""
    speculate_below: Positive = 16
    """rollout.speculation: only while at most this many samples run and none wait: the tail of a rollout."""
    oversample: NonNegative = 0
    """Prompts that every step begins beyond batch.num_prompts: as soon as that many groups are complete, the others are
    aborted, so that no step waits for its longest samples. Their prompts are used up, and what is trained on leans
    towards short responses (rollout/dropped_length_ratio). One process."""
    exact: bool = False
    """Products and attention, in the engine and in training, whose results for a token are the same bits whatever is
    computed beside it: sampled log-probs then equal the trainer's bit for bit. Slower; needs pages."""
    kv_cache_gb: Annotated[float, Field(gt=0)] | None = None
    """Most memory the KV cache may take, in GiB per device; fewer samples run at a time if needed; with
    pages, samples are preempted and computed again (rollout/preemptions). None: what is needed, and with pages on CUDA
    at most 0.85 of the memory that is free."""
    keep_cache: bool = True
    """Keep the KV cache's memory between rollouts; false gives it back before updates, and takes it again."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sample beside the tokenizer's end token."""
    ignore_eos: bool = False
    """Generate until max_new_tokens whatever is sampled (benchmarks)."""
    record: str | None = None
    """Folder to write every step's samples to, with tokens, log-probs, versions and verdicts, for `rollout.replay`."""
    replay: str | None = None
    """Folder written by `rollout.record`: train on its samples and verdicts instead of sampling and scoring. Seed,
    prompts and batch sizes must be as recorded. Evaluations still sample."""
    vllm: VllmSection = VllmSection()
    sglang: SglangSection = SglangSection()
    replicas: ReplicasSection = ReplicasSection()


Recompute = Literal["none", "all", "every_k", "selective"]
SelectiveKeep = Literal["matmuls", "half_matmuls", "attention"]


def _recompute_of_a_switch(value: Any) -> Any:
    """Recipes written when the setting was a switch stay valid: false is none, true is all."""
    return {True: "all", False: "none"}[value] if isinstance(value, bool) else value


class OptimizerSection(Section):
    """What every trained model has of its own."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; linear and cosine reach 0 after the last update."""
    warmup_steps: NonNegative = 0
    """Optimiser updates of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's moment decays."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's epsilon."""
    grad_clip: NonNegativeFloat = 1.0
    """Clip the global gradient norm at this; 0 = off."""


class TrainSection(OptimizerSection):
    preset: Literal["fast", "plain"] = "fast"
    """fast: on CUDA, fused layers (Llama, Mistral, Qwen2, Qwen3), head and loss in one pass and a fused optimiser;
    plain: transformers' own layers and torch's optimiser, the slow reference. The same on a CPU."""
    max_skipped_updates: Positive = 5
    """Stop with an error after so many consecutive updates skipped for a non-finite gradient."""
    logprob_chunk: Positive = 2048
    """Response tokens per chunk of the log-prob head; its peak extra memory is chunk x vocabulary."""
    param_offload: bool = False
    """Keep the reference model's weights on the host except while it scores; with several ranks, each its shards."""
    optimizer_offload: bool = False
    """Keep the optimiser's masters and moments in pinned host memory; an update streams them through the device group
    by group. Masters that are the weights themselves (float32 models, shards) stay."""
    activation_offload: bool = False
    """Keep activations on the host between forward and backward pass, copied while the device computes (after
    gradient checkpointing has left out what is recomputed). On a CPU it only costs time."""
    activation_offload_min_kb: NonNegative = 1024
    """activation_offload: tensors smaller than this many KiB stay on the device."""
    reshard_after_forward: bool = True
    """Several ranks: free a layer's gathered weights after its forward pass and gather them again for the backward
    pass; false keeps them, which saves one gather and costs a copy of the working weights."""
    forward_prefetch: NonNegative = 1
    """Several ranks: how many layers ahead the forward pass gathers weights explicitly; 0 = only what the order of
    kernels overlaps by itself."""
    gradient_sync: Literal["exact", "topk", "int8", "topk_int8"] = "exact"
    """What replicas (cluster.replicate_size) send each other of a gradient. exact: everything; topk: the elements of
    largest magnitude; int8: 8 bits an element; topk_int8: both. What is not sent is added to the next gradient, so the
    optimisation is another one than with exact; for links so slow that exact sync is most of a step."""
    gradient_sync_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """gradient_sync: topk and topk_int8 send this share of the elements; default 0.01."""
    gradient_sync_every: Positive = 1
    """Replicas update by themselves and average masters and moments after so many updates, and after each rollout's
    last; 1 = gradients are summed in every update. Another optimisation than summed gradients."""
    gradient_checkpointing: Annotated[Recompute, BeforeValidator(_recompute_of_a_switch)] = "none"
    """What the backward pass computes again instead of keeping it. none: nothing; all: every decoder layer from its
    input; every_k: every `checkpoint_every`-th layer; selective: everything but the results of matrix products and
    attention (`selective_keep`). Results are the same bits. true and false are read as all and none."""
    checkpoint_every: Positive = 2
    """gradient_checkpointing: every_k recomputes every so many layers; 1 = all of them."""
    selective_keep: SelectiveKeep = "matmuls"
    """gradient_checkpointing: selective keeps the outputs of attention, and of all matrix products (matmuls), of
    every second one (half_matmuls: about half the memory, half the recomputed FLOPs of all), or of none
    (attention)."""


class CriticSection(OptimizerSection):
    """The value model of algorithm.advantage: gae; refused with any other. What is not here it shares with the actor
    (section `train`)."""

    lr: NonNegativeFloat = 1e-5
    """Peak learning rate of the critic."""
    path: str | None = None
    """Model the critic starts from: a language model, which gets a value head of zeros, or a reward model (a sequence
    classifier with one label), whose head is kept. It must read the actor's token ids. Default: model.path."""
    revision: str | None = None
    """Revision of a Hugging Face id in critic.path."""
    pretrain_steps: NonNegative = 0
    """Steps at the start of the run in which the critic alone is updated; their samples come from the untouched
    actor."""
    num_epochs: Positive | None = None
    """Passes of the critic over a rollout's mini-batches; default: batch.num_epochs."""
    sequence_parallel_size: Positive | None = None
    """Ranks that share every sequence of the critic; default: cluster.sequence_parallel_size."""
    token_budget: Positive | None = None
    """Strict upper bound on the tokens of one micro-batch per device when the critic trains; default:
    batch.token_budget."""
    forward_token_budget: Positive | None = None
    """The same when it only estimates values; default: twice critic.token_budget, or batch.forward_token_budget where
    neither of the critic's budgets is set."""


class SftSection(Section):
    """Supervised fine-tuning (`paceline sft`). Rows come from the source that `task` names: a reasoning-gym task brings
    solved questions; a file holds conversations, or prompts with their answers. One step is one update on
    `batch.num_prompts` rows; the loss is the mean over the assistant's tokens of the whole update."""

    num_epochs: Positive = 1
    """Passes over the training rows; every row is learned exactly so often."""
    max_steps: Positive | None = None
    """Stop after so many updates, if the epochs have not ended before."""
    messages_key: str = "messages"
    """Column with a whole conversation, a list of chat messages: every assistant turn is learned. Rows without it hold
    a prompt (task.prompt_key) and a response."""
    response_key: str | None = None
    """Column with the response to the prompt; default: the first of completion, response, answer that is there."""
    max_length: Positive | None = None
    """Longest row in tokens; default: the model's context."""
    overlong: Literal["refuse", "drop", "truncate"] = "refuse"
    """A longer row: refuse the run, drop the row, or cut its end off. Both are counted."""
    mismatched: Literal["refuse", "drop", "split"] = "refuse"
    """A conversation whose turns are tokenised differently in the whole than on their own (templates that rewrite
    earlier turns): refuse the run, drop it and count it, or split it into one row per assistant turn."""
    liger: Literal["auto", "on", "off"] = "auto"
    """Liger's fused norms, RoPE and SwiGLU; auto: on CUDA where the package is installed and knows the family, unless
    paceline's own fused layers (train.preset) are in place; on: refuse the run where they cannot be used."""


class ScheduleSection(Section):
    name: Literal["sync", "sft"] = "sync"
    """Driver: sync = rollout, then update, one after the other; sft = supervised updates, set by `paceline sft`."""


class CheckpointSection(Section):
    every: NonNegative = 0
    """Save after every so many steps; 0 = only at the end and when asked to stop."""
    keep: Positive = 2
    """Complete checkpoints to keep."""
    asynchronous: bool = True
    """Write in the background; only the copy out of the training state blocks."""
    save_final: bool = True
    """Save after the last step."""
    export_hf: bool = False
    """Write the final weights in Hugging Face format to `export/` in the run's folder."""


class TelemetrySection(Section):
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Metric sinks beside metrics.jsonl, which is always written."""
    live: Literal["auto", "on", "off"] = "auto"
    """Live terminal display; auto: on when the terminal is interactive."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the OpenMetrics endpoint (http://host:port/metrics) while the run trains; 0: none. The first rank serves
    it for all."""
    metrics_host: str = "127.0.0.1"
    """Address the endpoint listens on; 0.0.0.0 lets every machine that reaches this one read the run's metrics."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Peak TFLOP/s per device for MFU on hardware the table does not know."""
    profile_every: Annotated[int, Field(ge=0)] = 0
    """Steps between two that run under the profiler on every rank, for causes/; 0 never. Such a step is slower and is
    marked in metrics.jsonl (`profiled`)."""
    keep_traces: bool = False
    """Keep the profiler's own traces of those steps in profiles/, host operators included; on a GPU that slows the
    profiled steps further."""
    sample_every_s: Annotated[float, Field(ge=0)] = 5.0
    """Seconds between two looks at this rank's device (utilisation, SM activity, power, clocks, memory) and at CPU and
    memory of the host, for device/; 0 never. Looks that are slow are taken less often: at most 1 % of one thread."""


class ClusterSection(Section):
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Device type; auto: CUDA where present, else an NPU, else CPU. NPUs (torch-npu) are unverified."""
    num_devices: Positive = 1
    """Devices that train together, one process each:
    replicate_size x shard_size x sequence_parallel_size x tensor_parallel_size."""
    replicate_size: Positive = 1
    """Copies of the sharded weights (HSDP): gradients are all-reduced over them once per update, and only within one
    copy are weights gathered. Put it where links are slow: between nodes."""
    shard_size: Positive | None = None
    """Data ranks that share one copy of weights, gradients and optimiser state (FSDP); default: all that are left."""
    sequence_parallel_size: Positive = 1
    """Ranks that share every sequence (Ulysses): each computes a part of its tokens, and a part of the heads in
    attention. A micro-batch may then hold token_budget x this many tokens."""
    reference_sequence_parallel_size: Positive | None = None
    """The same for the reference model; default: sequence_parallel_size."""
    tensor_parallel_size: Positive = 1
    """Ranks that share every matrix product and the vocabulary; keep them on one node."""
    device_name: str | None = None
    """Device a recipe is planned for, by a name telemetry/hardware.py knows (H200): its memory is what `--dry-run`
    checks the memory estimate against on another machine. A run looks at its own device."""
    device_memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Memory of one device in GB (10^9 bytes) for the memory estimate; default: what the device (a run), or the
    table's entry for `device_name` (`--dry-run`), says."""
    collective_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds a rank waits for the others before it ends the run and names who is missing."""
    num_threads: NonNegative = 0
    """CPU threads per process; 0 = torch's own choice."""


class Config(Section):
    """A whole run. Build it with `paceline.config.load_config`, which adds presets and cross-field rules."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    lora: LoraSection = LoraSection()
    task: TaskSection = TaskSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    batch: BatchSection = BatchSection()
    rollout: RolloutSection = RolloutSection()
    agent: AgentSection = AgentSection()
    train: TrainSection = TrainSection()
    critic: CriticSection = CriticSection()
    sft: SftSection = SftSection()
    schedule: ScheduleSection = ScheduleSection()
    checkpoint: CheckpointSection = CheckpointSection()
    telemetry: TelemetrySection = TelemetrySection()
    cluster: ClusterSection = ClusterSection()
