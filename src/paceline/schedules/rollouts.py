"""Prompts to scored groups: sampling, rewards while sampling, and dynamic sampling with a bound."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar

from paceline.algorithms.reward_shaping import has_signal
from paceline.config.decisions import shares_weights, sleeps_between_rollouts
from paceline.data.seeds import sample_seed
from paceline.data.tasks import max_new_tokens_for
from paceline.engine.meeting import meet
from paceline.engine.sharding import unsharded
from paceline.rewards.combination import SourcedRewards
from paceline.rollout import NativeEngine, PagedEngine, RolloutRequest, SamplingParams
from paceline.rollout.early_stop import generate_enough
from paceline.rollout.protocol import OnSample
from paceline.schedules.agent_setup import completion_of
from paceline.schedules.recorded_rollouts import replay_groups
from paceline.schedules.setup import Run
from paceline.schedules.sharing import Part, into_groups, own_parts
from paceline.telemetry.traffic import rollout_bytes
from paceline.types import Cause, Group, Prompt, RewardJob, Sample, Verdict

P = TypeVar("P")


class Rewards(Protocol[P]):
    """What scores a run's samples: one `RewardPool`, or `SourcedRewards`. `P` is what a submitted job is known by."""

    def submit(self, job: RewardJob) -> P:
        """Takes one job and returns at once."""
        ...

    def aborted(self) -> Verdict:
        """The verdict of a sample that is not whole and so was not submitted."""
        ...

    def flush(self) -> None:
        """No more jobs for now. Every rank calls it once per rollout."""
        ...

    def gather(self, pending: Sequence[P]) -> list[Verdict]:
        """Verdicts in order, each sample by itself."""
        ...


@dataclass(frozen=True, slots=True)
class Rollout:
    """The groups a step trains on, and what dynamic sampling left out to get them.

    `prompt_ids` are all prompts the step has used up, dropped ones included. `is_exhausted`: the bound on generations
    was reached before there were enough groups with a signal.
    """

    groups: tuple[Group, ...]
    prompt_ids: tuple[str, ...]
    num_generations: int = 1
    num_groups_dropped: int = 0
    is_exhausted: bool = False

    @property
    def samples(self) -> list[Sample]:
        """Samples of all groups."""
        return [sample for group in self.groups for sample in group.samples]

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdicts of all groups."""
        return [verdict for group in self.groups for verdict in group.verdicts]


def collect_groups(run: Run, step: int) -> Rollout:
    """Samples and scores the prompts of one step.

    With dynamic sampling (DAPO, Yu et al. 2025) groups whose members all score alike are dropped and new prompts are
    sampled in their place, at most `algorithm.max_generations` times; then the step trains on what it has.

    With over-sampling the step trains on the groups that are complete first; the prompts of the others are used up.
    """
    settings = run.config.algorithm
    with run.ledger.span("data", cause="data"):
        prompts = run.loader.next_batch()
        enough = len(prompts)
        prompts += run.loader.extra(run.config.rollout.oversample)
    if not settings.dynamic_sampling:
        return Rollout(
            tuple(sample_and_score(run, prompts, step, enough)),
            tuple(prompt.prompt_id for prompt in prompts),
        )
    wanted = len(prompts)
    used: list[str] = []
    kept: list[Group] = []
    num_dropped = num_generations = 0
    while len(kept) < wanted and num_generations < settings.max_generations:
        if num_generations:
            with run.ledger.span("data", cause="data"):
                prompts = run.loader.extra(wanted - len(kept))
        groups = sample_and_score(run, prompts, step, earlier=used)
        used += [prompt.prompt_id for prompt in prompts]
        num_generations += 1
        alive = [group for group in groups if has_signal([verdict.score for verdict in group.verdicts])]
        num_dropped += len(groups) - len(alive)
        kept += alive
    return Rollout(tuple(kept), tuple(used), num_generations, num_dropped, is_exhausted=len(kept) < wanted)


def sample_and_score(
    run: Run, prompts: Sequence[Prompt], step: int, enough: int | None = None, earlier: Sequence[str] = ()
) -> list[Group]:
    """One group per prompt at the training temperature; seeds follow from master seed, prompt, sample and step.

    `enough`: of how many prompts, those whose groups are complete first; None is all. `earlier`: prompts (by id) that
    the step has sampled already. One that comes again, because the step has had them all, goes on with seeds of its
    own: from the same seeds it would be given the same samples.
    """
    num_samples = run.config.batch.num_samples
    num_before = Counter(earlier)
    requests = []
    for prompt in prompts:
        first_sample = num_before[prompt.prompt_id] * num_samples
        requests.append(rollout_request(run, prompt, num_samples, step, first_sample))
        num_before[prompt.prompt_id] += 1
    temperature = run.config.rollout.temperature
    if run.replay is not None:
        params = SamplingParams(temperature, run.stop_token_ids, run.config.rollout.ignore_eos)
        with run.ledger.span("rollout", "replay", cause="data"):
            return replay_groups(run.replay, step, requests, params)
    groups = generate_groups(run, requests, temperature, enough)
    if run.recorder is not None:
        with run.ledger.span("rollout", "record", cause="data"):
            run.recorder.add(step, groups)
    return groups


def rollout_request(
    run: Run, prompt: Prompt, num_samples: int, step: int, first_sample: int = 0
) -> RolloutRequest:
    """The request for one group, with the seeds of the prompt's samples from `first_sample` on."""
    numbers = range(first_sample, first_sample + num_samples)
    seeds = (sample_seed(run.config.run.seed, prompt.prompt_id, number, step) for number in numbers)
    limit = max_new_tokens_for(prompt, run.config.rollout.max_new_tokens, run.model.max_context)
    return RolloutRequest(prompt, tuple(seeds), limit)


def generate_groups(
    run: Run, requests: Sequence[RolloutRequest], temperature: float, enough: int | None = None
) -> list[Group]:
    """Generates and scores; a sample goes to the reward's sources the moment it is finished (over-sampled: the moment
    its group is known to be kept).

    Each rank does its share, with the whole weights; every rank gets all groups.
    """
    if not isinstance(run.pool, SourcedRewards):
        return _generate_groups(run, run.pool, requests, temperature, enough)
    return run.pool.compare(_generate_groups(run, run.pool, requests, temperature, enough))


def _generate_groups(
    run: Run, rewards: Rewards[P], requests: Sequence[RolloutRequest], temperature: float, enough: int | None
) -> list[Group]:
    parts = own_parts(requests, run.mesh.world_size, run.mesh.rank)
    pending: dict[tuple[int, int], P] = {}
    finish_s: list[float] = []

    def submit(part_index: int, sample: Sample) -> None:
        finish_s.append(time.perf_counter() - begin)
        if is_aborted(sample):
            return
        prompt = parts[part_index].request.prompt
        completion = completion_of(run.config, run.tokenizer, sample)
        job = RewardJob(prompt.text, completion, prompt.answer, prompt.metadata, prompt.messages)
        pending[part_index, sample.sample_index] = rewards.submit(job)

    def verdict_of(part_index: int, sample: Sample) -> Verdict:
        if is_aborted(sample):
            return rewards.aborted()
        return rewards.gather([pending[part_index, sample.sample_index]])[0]

    params = SamplingParams(temperature, run.stop_token_ids, run.config.rollout.ignore_eos)
    # an engine in processes of its own works where this rank's profiler does not see it
    waits_for: Cause | None = None if shares_weights(run.config) else "queue"
    with whole_weights(run), run.ledger.span("rollout", cause=waits_for) as span:
        begin = time.perf_counter()
        kept, generated = _generate(run, parts, params, submit, enough)
        run.finish_s = tuple(finish_s)
        stats = run.engine.stats
        num_bytes = least_traffic(run, [parts[index] for index in kept], generated)
        span.add(tokens=stats.num_generated_tokens, flops=stats.flops, num_bytes=num_bytes)
        if sleeps_between_rollouts(run.config):
            run.engine.sleep()
    with run.ledger.span("reward", cause="queue"):
        rewards.flush()
        scored = [
            (parts[index].own(sample), verdict_of(index, sample))
            for index, samples in zip(kept, generated, strict=True)
            for sample in samples
        ]
    meet(run.mesh, run.ledger, "the others' samples")
    wanted = requests if run.over_sampled is None else [requests[index] for index in kept]
    with run.ledger.span("rollout", "exchange", cause="communication"):
        return into_groups(wanted, chain.from_iterable(run.mesh.gather_objects(scored)))


def is_aborted(sample: Sample) -> bool:
    """Whether a sample was interrupted and has nothing to learn from: half an episode, whose program has failed."""
    return sample.finish_reason == "abort" and not any(sample.loss_mask)


def _generate(
    run: Run, parts: Sequence[Part], params: SamplingParams, submit: OnSample, enough: int | None
) -> tuple[Sequence[int], Sequence[tuple[Sample, ...]]]:
    """Which parts were generated (over-sampling leaves some out), and their samples."""
    requests = [part.request for part in parts]
    run.over_sampled = None
    if enough is None or enough >= len(requests):
        return range(len(parts)), (run.agent or run.engine).generate(requests, params, submit)
    assert isinstance(run.engine, NativeEngine | PagedEngine)  # config/engine_rules.py
    run.engine.begin_stats()
    run.over_sampled = generate_enough(run.engine, requests, params, enough, submit)
    return run.over_sampled.complete, run.over_sampled.groups


def least_traffic(run: Run, parts: Sequence[Part], generated: Sequence[Sequence[Sample]]) -> int:
    """Bytes the rollout moved at least (`telemetry.traffic`): one pass for the prompts, and one a decoding step."""
    if not parts:
        return 0
    lengths = [
        (len(part.request.prompt.token_ids), len(sample.token_ids))
        for part, samples in zip(parts, generated, strict=True)
        for sample in samples
    ]
    num_passes = run.engine.stats.num_decode_steps + 1
    return rollout_bytes(run.model.shape, lengths, num_passes, run.model.dtype.itemsize)


@contextmanager
def whole_weights(run: Run) -> Iterator[None]:
    """The rollout engine holds all weights inside; with several ranks they are gathered, and freed again after."""
    if not shares_weights(run.config):  # it has its own, loaded after the last update
        yield
        return
    with ExitStack() as stack:
        with run.ledger.span("sync", "gather weights", cause="communication"):
            stack.enter_context(unsharded(run.trainer.engine.sharded))
        yield
        if run.mesh.world_size > 1:
            run.engine.sleep()  # the cache must not take memory from training
