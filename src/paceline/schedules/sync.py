"""The synchronous schedule: sample with the current weights, update them, repeat. Zero staleness."""

from collections.abc import Iterator, Sequence

import numpy as np

from paceline.config.critic import critic_epochs
from paceline.data.seeds import child_seed
from paceline.engine.samples import TrainSample
from paceline.engine.trainer import with_old_logprobs
from paceline.schedules.credit import assign_credit
from paceline.schedules.recorder import Recorder
from paceline.schedules.rollouts import collect_groups
from paceline.schedules.setup import Run


def train_synchronously(run: Run, recorder: Recorder) -> None:
    """Trains until `run.num_steps`, or until a request to stop is heard before or after a step."""
    while run.state.step < run.config.run.num_steps and not run.stop_requested():
        step = run.state.step + 1
        with run.instruments.step(step):
            recorder.begin(step)
            rollout = collect_groups(run, step)
            batch = assign_credit(run, rollout.groups)
            recorder.rollout(rollout, batch)
            if run.critic is not None:
                for mini_batch in mini_batches(run, batch.groups, step, critic_epochs(run.config)):
                    run.critic.update(mini_batch, recorder.metrics)
                run.critic.engine.replicas.average_now(recorder.metrics)
            if step > run.config.critic.pretrain_steps:
                samples = with_old_logprobs(run.trainer, batch.groups, run.old_logprob.source)
                for mini_batch in mini_batches(run, samples, step, run.config.batch.num_epochs):
                    run.trainer.update(mini_batch, recorder.metrics)
                run.trainer.engine.replicas.average_now(recorder.metrics)
            run.sync.publish(version=step)
            run.loader.mark_consumed(rollout.prompt_ids)
            run.state.step = step
            recorder.evaluate_if_due(step)
            recorder.save_if_due(step)
        recorder.end(step)
    recorder.save_if_interrupted()


def mini_batches(
    run: Run, groups: Sequence[Sequence[TrainSample]], step: int, num_epochs: int
) -> Iterator[list[TrainSample]]:
    """Whole groups, `mini_batch_prompts` at a time; every epoch after the first in an order drawn from the seed."""
    size = run.config.batch.mini_batch_prompts or run.config.batch.num_prompts
    for epoch in range(num_epochs):
        order = np.arange(len(groups))
        if epoch:
            seed = child_seed(run.config.run.seed, "mini_batches", step, epoch)
            order = np.random.default_rng(seed).permutation(len(groups))
        for start in range(0, len(groups), size):
            yield [sample for index in order[start : start + size] for sample in groups[index]]
