"""Every metric a run may record: its reduction, unit and meaning, declared once. Torch-free.

A name that is not declared here is refused where it is recorded, so that no figure exists without a meaning.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Literal

from paceline.types import STAGES, Stage

Reduction = Literal["sum", "mean", "max", "min", "last"]
"""How values of one step (of its micro-batches, updates and ranks) become one: `mean` is weighted by the weight given
with each value, `last` keeps the latest and is for values that are the same on every rank."""


TABLE_BEGIN = "<!-- metrics: begin -->"
TABLE_END = "<!-- metrics: end -->"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One declared metric."""

    name: str
    reduction: Reduction
    unit: str
    description: str


class UnknownMetricError(KeyError):
    """A name was recorded that no schema declares; the message names the nearest one that is."""

    def __init__(self, name: str) -> None:
        self.name = name
        nearest = get_close_matches(name, METRICS, n=1, cutoff=0.0)
        self.nearest = nearest[0]
        super().__init__(name)

    def __str__(self) -> str:
        return (
            f"metric {self.name!r} is not declared in telemetry/metric_schema.py (nearest: {self.nearest!r})"
        )


def spec_of(name: str) -> MetricSpec:
    """The declaration of `name`.

    Raises:
        UnknownMetricError: it has none.
    """
    spec = METRICS.get(name) or _of_a_source(name)
    if spec is None:
        raise UnknownMetricError(name)
    return spec


def _of_a_source(name: str) -> MetricSpec | None:
    """The declaration of a reward source's metric, under the source's own name."""
    parts = name.split("/")
    if len(parts) != 3 or parts[0] != "reward" or not parts[1]:
        return None
    declared = METRICS.get(f"reward/<source>/{parts[2]}")
    return None if declared is None else replace(declared, name=name)


_REWARD = """
reward/mean | mean | score | Mean reward, shaping included, of the step's samples that have a verdict.
reward/std | mean | score | Standard deviation of these rewards over the step's samples.
reward/max | max | score | Largest of these rewards.
accuracy/train | mean | share | Samples with a full score (1.0 or more) among those with a verdict.
reward/timeouts | sum | samples | Scorings killed at the time limit; no score.
reward/errors | sum | samples | Scorings that raised or whose worker died; no score.
samples/without_verdict | sum | samples | Samples left out of their group's statistics: timeouts and errors.
reward/<source>/mean | mean | score | Mean score of one of several reward sources, before its weight.
reward/<source>/errors | sum | samples | Samples that this source failed to score.
reward/<source>/timeouts | sum | samples | Samples that this source did not score in time.
reward/<source>/left_out | sum | samples | Its scores left out: it is optional and failed for another of the prompt.
reward/<source>/workers_replaced | sum | workers | Workers of a rule replaced because they hung or died.
reward/<source>/requests | sum | requests | Requests to a remote source, repetitions aside.
reward/<source>/retries | sum | requests | Requests repeated after a failed connection or a 5xx answer.
reward/<source>/overlong | sum | samples | Conversations too long for this source's model; errors.
reward/<source>/unparseable | sum | samples | Verdicts of a judge that hold no valid score; errors.
reward/<source>/verdict_tokens | sum | tokens | Tokens a judge wrote.
"""

_OBJECTIVE = """
loss/total | sum | nats | Loss as differentiated: partial sums of micro-batches over one global denominator.
loss/policy | sum | nats | Policy part of the loss.
loss/kl | sum | nats | KL part of the loss, coefficient included.
loss/entropy | sum | nats | Entropy part of the loss, coefficient and sign included.
entropy | mean | nats | Entropy of the policy per loss token, at the sampling temperature.
kl/reference | mean | nats | Estimated KL to the reference model per loss token.
kl/capped_fraction | mean | share | Loss tokens whose KL estimate stands at algorithm.kl_cap, without a gradient.
kl/old | mean | nats | Estimated KL to the weights the old log-probs belong to, per loss token.
clip_fraction | mean | share | Loss tokens (sequences for a sequence-level ratio) whose ratio the clip bounds.
ratio/mean | mean | ratio | Importance ratio of current to old probability per loss token.
ratio/max | max | ratio | Largest importance ratio.
"""

_UPDATE = """
grad_norm | mean | norm | Gradient norm before clipping, mean over the step's updates; not finite if one was not.
lr | last | rate | Learning rate of the step's last update.
updates/applied | sum | updates | Optimiser updates applied.
updates/skipped | sum | updates | Optimiser updates skipped for a gradient that was not finite.
updates/empty | sum | updates | Mini-batches without a token to train on; nothing moved.
micro_batches | sum | micro-batches | Forward-backward passes over samples.
micro_batches/no_op | sum | micro-batches | Passes without samples, run while other ranks had some left.
"""

_CRITIC = """
values/mean | mean | score | The critic's values before its update, per loss token.
returns/mean | mean | score | Returns (lambda-weighted) its values are fitted to, per loss token.
critic/explained_variance | mean | share | 1 - Var(return - value) / Var(return) of these; 1 perfect, 0 constant.
critic/loss | sum | score^2 | Critic's loss as differentiated: partial sums over one global denominator.
critic/clip_fraction | mean | share | Loss tokens whose value the clip holds: already moved past algorithm.value_clip.
critic/grad_norm | mean | norm | Critic's gradient norm before clipping, mean over the step's updates.
critic/lr | last | rate | Learning rate of the critic's last update in the step.
critic/updates/applied | sum | updates | Critic updates applied.
critic/updates/skipped | sum | updates | Critic updates skipped for a gradient that was not finite.
critic/updates/empty | sum | updates | Mini-batches without a token to train the critic on; nothing moved.
critic/micro_batches | sum | micro-batches | Forward-backward passes of the critic over samples.
critic/micro_batches/no_op | sum | micro-batches | Its passes without samples, while other ranks had some left.
critic/tokens/laid_out | sum | tokens | Token slots computed by the critic's updates, padding included.
critic/tokens/padding | sum | tokens | Those of them that no token of a sample takes.
critic/batch/distinct_shapes | max | shapes | Shapes the critic's passes met since the process began; largest rank's.
critic/batch/new_shapes | sum | shapes | Shapes the critic's updates met for the first time.
critic/gradient_sync/bytes | sum | bytes | Bytes the critic's replicas sent each other, all ranks.
critic/gradient_sync/held_back | mean | share | The critic's gradient_sync/held_back.
critic/gradient_sync/lost_on_resume | last | norm | The critic's gradient_sync/lost_on_resume.
critic/tokens/effective_share | mean | share | Tokens of the samples per slot the critic's updates computed.
critic/samples/overlong | sum | samples | Samples over the critic's token budget, each in a micro-batch of its own.
steps/critic_alone | sum | steps | 1 in a step that trained the critic and not the policy (critic.pretrain_steps).
"""

_TOKENS = """
tokens/prompt | sum | tokens | Prompt tokens, counted once per sample.
tokens/response | sum | tokens | Response tokens sampled, end tokens included.
tokens/loss | sum | tokens | Response tokens the loss is taken over.
tokens/laid_out | sum | tokens | Token slots computed by the updates, padding included.
tokens/padding | sum | tokens | Those of them that no token of a sample takes: padding of rows, and empty rows.
batch/distinct_shapes | max | shapes | Shapes (rows x width, by stage) met since the process began; the largest rank's.
batch/new_shapes | sum | shapes | Shapes the updates met for the first time: kernels that plan by shape pause for each.
gradient_sync/bytes | sum | bytes | Bytes that replicas (cluster.replicate_size) sent each other in updates, all ranks.
gradient_sync/held_back | mean | share | Norm of what a rank did not send over that of what it had to send.
gradient_sync/lost_on_resume | last | norm | Norm of what replicas held back when the checkpoint resumed from was saved.
tokens/effective_share | mean | share | Tokens of the samples per slot computed; above 1 where prefixes are shared.
samples/zero_advantage_skipped | sum | samples | Samples not computed: advantage zero; still in the denominators.
tokens/zero_advantage_skipped | sum | tokens | Tokens of these samples.
samples/masked | sum | samples | Samples without a loss token.
samples/overlong | sum | samples | Samples longer than the token budget, each in a micro-batch of its own.
samples/truncated | sum | samples | Samples that reached the token limit.
samples/aborted | sum | samples | Samples whose generation was interrupted.
response_length/mean | mean | tokens | Response length, end token included.
response_length/max | max | tokens | Longest response.
response_length/min | min | tokens | Shortest response.
truncated_fraction | mean | share | Samples that reached the token limit among all.
"""

_MEMORY = """
memory/activation_bytes_offloaded | sum | bytes | Activations copied to the host by the updates, all ranks.
memory/out_of_memory_retries | sum | retries | Mini-batches begun again with a smaller token budget: memory ran out.
memory/token_budget | min | tokens | Token budget of the updates; falls when memory runs short.
critic/memory/out_of_memory_retries | sum | retries | The same for the critic's updates.
critic/memory/token_budget | min | tokens | Token budget of the critic's updates.
"""

_ROLLOUT = """
groups/zero_signal | sum | groups | Groups trained on whose scores are all equal: no gradient from their advantage.
groups/dropped_no_signal | sum | groups | Groups dynamic sampling dropped because their scores are all equal.
groups/dropped_no_verdict | sum | groups | Groups dropped because no member has a verdict.
groups/singleton | sum | groups | Groups with one verdict only: no baseline, advantage zero.
rollout/generations | sum | rollouts | Rollouts the step needed; above 1 with dynamic sampling only.
rollout/exhausted | sum | steps | 1 when dynamic sampling stopped at its bound, short of groups.
rollout/logprob_difference_mean | mean | nats | |trainer's log-prob - sampled log-prob| per loss token.
rollout/logprob_difference_max | max | nats | Largest such difference.
rollout/prefill_tokens | sum | tokens | Prompt tokens the engine computed; a shared prompt counts once.
rollout/mean_running | mean | samples | Samples decoded at the same time, mean over the decoding steps.
rollout/cache_bytes | max | bytes | Memory of the KV cache per device.
rollout/finish_p50_s | max | s | From a rollout's begin until half of a device's samples had finished.
rollout/finish_p90_s | max | s | The same for 90 % of them.
rollout/finish_p99_s | max | s | The same for 99 % of them.
rollout/finish_last_s | max | s | The same for all of them.
rollout/dropped_groups | sum | groups | Groups that over-sampling aborted because enough others were complete.
rollout/dropped_samples | sum | samples | Their samples, finished ones included.
rollout/dropped_tokens | sum | tokens | Tokens that had been sampled for them.
rollout/dropped_length_ratio | mean | ratio | Mean length of dropped samples so far over that of kept ones.
rollout/tail_s | max | s | How long the last 5 % of the samples (at least one) ran with no others beside them.
rollout/tail_idle_s | sum | s | Device-seconds idle in that time: the share of unused slots times the time.
rollout/preemptions | sum | samples | Samples that gave their pages up because the cache was full, and went on later.
rollout/preempted_tokens | sum | tokens | Cached tokens of preempted samples, which were computed again.
rollout/drafted_tokens | sum | tokens | Tokens proposed by earlier text (rollout.speculation) and verified.
rollout/accepted_drafts | sum | tokens | Those of them that the model drew, each of which saved a round of its sample.
rollout/cached_tokens | sum | tokens | Prompt tokens not computed because the engine's prefix cache held them.
rollout/redone_samples | sum | samples | Samples begun again because the replica that had begun them died.
rollout/dead_replicas | sum | replicas | Rollout replicas that died.
rollout/refusals | sum | refusals | Times a replica could take no samples, say for want of memory; they waited.
prompts/consumed | sum | prompts | Prompts the step consumed; the loader's saved position counts these.
weight_version | last | version | Version of the weights after the step.
profiled | max | steps | 1 in a step that ran under the profiler, and so slower: leave it out of statistics of time.
profiler/seconds | max | s | Starting, stopping and reading the profiler, before and after the step; slowest rank's.
device/samples_failed | sum | samples | Looks at device or host that failed meanwhile, all ranks (device/).
profiler/lost | sum | profiles | Ranks' profiles of a due step that were lost: no causes of it are written.
profiler/truncated | sum | profiles | Ranks' profiles whose buffers were full before the step's end.
epoch | last | epochs | Passes over the prompts begun, from 0.
"""

_SPEED = """
throughput/tokens_per_s | sum | tokens/s | tokens/prompt and tokens/response per second of the step, all devices.
throughput/tokens_per_s_per_device | mean | tokens/s | The same per device; ranks that share tokens count each once.
throughput/generated_tokens_per_s | sum | tokens/s | Tokens sampled, dropped too, per second of the longest rollout.
time/step | mean | s | Wall time of the step, mean over ranks.
time/unaccounted | mean | s | Wall time no span covered, mean over ranks.
mfu/step | mean | share | Model FLOPs of the whole step over its wall time and the peak; absent without a known peak.
tflops/step | mean | TFLOP/s | Model FLOPs of the whole step per second of its wall time and device.
balance/tokens_max_over_mean | max | ratio | Most token slots of update_actor on one rank, over the mean of ranks.
balance/flops_max_over_mean | max | ratio | Most FLOPs of update_actor on one rank, over the mean of ranks.
balance/busy_max_over_mean | max | ratio | Longest time of the step a rank did not wait, over the mean of ranks.
balance/slowest_rank | last | rank | The rank with that longest time.
memory/peak_allocated | max | bytes | Most device memory held by tensors; 0 on a CPU.
memory/peak_reserved | max | bytes | Most device memory held by the allocator; 0 on a CPU.
memory/host_rss | max | bytes | Resident host memory of the largest process, children not included.
checkpoint/blocked_s | sum | s | Time training stood still for checkpoints.
checkpoint/waits | sum | waits | Saves that had to wait for the previous one to be written.
"""

_EVALUATION = """
eval/accuracy | mean | share | Held-out completions with a full score among those with a verdict.
eval/mean_score | mean | score | Mean score of the held-out completions with a verdict.
eval/completions | sum | samples | Held-out completions.
eval/without_verdict | sum | samples | Held-out completions without a verdict.
"""

_SFT = """
eval/loss | mean | nats | Mean negative log-likelihood per learned token of the held-out rows.
eval/perplexity | mean | ratio | exp of eval/loss.
eval/tokens | sum | tokens | Learned tokens of the held-out rows.
rows/learned | sum | rows | Supervised rows the step learned from.
rows/overlong_dropped | sum | rows | Supervised rows left out because they are longer than the limit.
rows/truncated | sum | rows | Supervised rows whose end was cut off at the limit.
rows/tokens_truncated | sum | tokens | Tokens cut off with it.
rows/mismatched | sum | rows | Supervised rows left out because a turn is tokenised differently on its own.
rows/split | sum | rows | Conversations made into one row per assistant turn for the same reason.
rows/without_loss_tokens | sum | rows | Supervised rows left out because no token of theirs is learned.
rows/without_end_token | sum | rows | Supervised rows with a learned turn that no end token closes.
rows/duplicates | sum | rows | Training rows left out because a held-out or shown row asks the same.
"""


def _parse(table: str) -> Iterator[MetricSpec]:
    reductions: dict[str, Reduction] = {
        "sum": "sum",
        "mean": "mean",
        "max": "max",
        "min": "min",
        "last": "last",
    }
    for line in table.strip().splitlines():
        name, reduction, unit, description = line.split(" | ", 3)
        yield MetricSpec(name, reductions[reduction], unit, description)


def _stage_times() -> Iterator[MetricSpec]:
    for stage in STAGES:
        text = f"Self-time of stage {stage} in the step, mean over ranks."
        yield MetricSpec(f"time/{stage}", "mean", "s", text)


def _stage_work() -> Iterator[MetricSpec]:
    for stage in MODEL_STAGES:
        work = f"Model FLOPs of stage {stage} per second of its self-time and device"
        yield MetricSpec(f"tflops/{stage}", "mean", "TFLOP/s", f"{work}.")
        yield MetricSpec(
            f"mfu/{stage}", "mean", "share", f"{work}, over the peak; absent without a known peak."
        )


def _by_name(specs: Iterable[MetricSpec]) -> dict[str, MetricSpec]:
    found: dict[str, MetricSpec] = {}
    for spec in specs:
        if spec.name in found:
            raise ValueError(f"metric {spec.name!r} is declared twice")
        found[spec.name] = spec
    return found


MODEL_STAGES: tuple[Stage, ...] = (
    "rollout",
    "reward",
    "old_logprob",
    "ref_logprob",
    "values",
    "update_critic",
    "update_actor",
    "eval",
)
"""Stages that run a model, and so have FLOPs."""

_AGENT = """
agent/episodes | sum | episodes | Episodes played.
agent/turns | mean | answers | Answers of the model per episode.
agent/calls | mean | calls | Tool calls per episode, malformed ones included.
agent/malformed_calls | sum | calls | Calls that named no tool or were not well formed; the model was told.
agent/errors | sum | calls | Calls (or programs) that raised; the model was told of a call's error.
agent/timeouts | sum | calls | Calls (or programs) killed at `agent.timeout_s`.
agent/outputs_cut | sum | calls | Outputs cut to `agent.max_output_tokens`.
agent/out_of_turns | sum | episodes | Episodes ended by `agent.max_turns` while the model called a tool.
agent/out_of_room | sum | episodes | Episodes ended because a tool's output left no room for another answer.
agent/inserted_tokens | sum | tokens | Tokens put between answers, masked from the loss.
agent/branches_dropped | sum | branches | Shorter branches of programs' episodes that were not trained on.
agent/without_turn | sum | episodes | Programs that ended without asking the model anything.
agent/tool_s | sum | s | Seconds of calls (or programs), side by side ones each; `time/tools` is what was waited for.
"""

_TABLES = (
    _AGENT,
    _REWARD,
    _OBJECTIVE,
    _UPDATE,
    _CRITIC,
    _TOKENS,
    _MEMORY,
    _ROLLOUT,
    _SPEED,
    _EVALUATION,
    _SFT,
)

METRICS: dict[str, MetricSpec] = _by_name(chain(*map(_parse, _TABLES), _stage_times(), _stage_work()))
"""All declared metrics by name, in the order of docs/records.md."""


def metric_table() -> str:
    """The metrics as a Markdown table."""
    rows = [
        f"| `{spec.name}` | {spec.reduction} | {spec.unit} | {spec.description.replace('|', chr(92) + '|')} |"
        for spec in METRICS.values()
    ]
    return "\n".join(["| Metric | Reduction | Unit | Meaning |", "|---|---|---|---|", *rows])


def with_metric_table(document: str) -> str:
    """`document` (docs/records.md) with the present table between its markers.

    Raises:
        ValueError: it does not hold each marker once.
    """
    if document.count(TABLE_BEGIN) != 1 or document.count(TABLE_END) != 1:
        raise ValueError(f"the document must hold {TABLE_BEGIN} and {TABLE_END} once each")
    before, rest = document.split(TABLE_BEGIN)
    _, after = rest.split(TABLE_END)
    return f"{before}{TABLE_BEGIN}\n{metric_table()}\n{TABLE_END}{after}"


if __name__ == "__main__":  # python -m paceline.telemetry.metric_schema docs/records.md
    path = Path(sys.argv[1])
    path.write_text(with_metric_table(path.read_text(encoding="utf-8")), encoding="utf-8")
