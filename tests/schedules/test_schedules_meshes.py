"""Small runs on every kind of mesh: what a step does over ranks equals what one rank does."""

import json
import os
from pathlib import Path

import pytest
from rank_group import run_placed
from test_schedules_sft import sft_sections
from tiny_runs import ROLLOUT_CLOCKS, tiny_sections

from paceline.config import ConfigError, load_config, load_sft_config
from paceline.schedules import run_sft, run_training
from paceline.schedules.place import placed, refused_together
from paceline.telemetry.metrics import read_metrics

TESTS = Path(__file__).parents[1]
NOT_COMPARED = (
    "time/",
    "throughput/",
    "memory/",
    "tflops/",
    "mfu/",
    "checkpoint/",
    "balance/",
    *ROLLOUT_CLOCKS,
)
# what depends on how samples are laid out and divided
LAYOUT = (
    "batch/",
    "critic/batch/",
    "micro_batches",
    "critic/micro_batches",
    "tokens/laid_out",
    "critic/tokens/laid_out",
    "tokens/effective_share",
    "critic/tokens/effective_share",
    "batch/",
    "critic/batch/",
    "rollout/mean_running",
    "rollout/cache_bytes",
    "rollout/prefill_tokens",
)


@pytest.fixture(autouse=True)
def rewards_are_importable(monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(TESTS / "model"), os.environ.get("PYTHONPATH", "")])
    )


def sections_of(folder: Path, name: str, **changes):
    # eps of the gradients' size: Adam's first step is else the sign of the gradient, and signs of zeros are noise
    changes["train"] = {"lr": 1e-3, "eps": 1e-3, **changes.get("train", {})}
    changes["run"] = {"name": name, "num_steps": 2, **changes.get("run", {})}
    changes["cluster"] = {"device": "cpu", **changes.get("cluster", {})}
    return tiny_sections(folder, **changes)


def run_one(sections) -> str:
    """What a rank of the run does, and what one process alone does."""
    return str(run_training(load_config(None, sections=sections)).run_dir)


def run_one_sft(sections) -> str:
    """The same for supervised runs."""
    return str(run_sft(load_sft_config(None, sections=sections)).run_dir)


def compared(run_dir) -> dict[int, dict[str, float]]:
    return {
        record.step: {
            name: value
            for name, value in record.metrics.items()
            if not name.startswith((*NOT_COMPARED, *LAYOUT))
        }
        for record in read_metrics(Path(run_dir))
    }


def assert_equal_metrics(found, expected) -> None:
    assert list(found) == list(expected)
    for step, metrics in expected.items():
        assert set(metrics) <= set(found[step])
        for name, value in metrics.items():
            assert found[step][name] == pytest.approx(value, rel=1e-5, abs=1e-5), (step, name)


SETTINGS = {
    "dynamic sampling": {
        "algorithm": {"name": "dapo", "overlong_cache": 2, "max_generations": 3},
        "batch": {"num_prompts": 3},
    },
    "several updates, recomputed old log-probs, entropy": {
        "algorithm": {"entropy_coefficient": 0.01, "old_logprob": "recompute"},
        "batch": {"mini_batch_prompts": 2, "num_epochs": 2},
        "train": {"lr": 1e-4},  # the largest ratio of eight updates magnifies rounding
    },
    "PPO with a critic": {"algorithm": {"name": "ppo"}},
    "padded": {"batch": {"layout": "padded"}},
}
MESHES = {
    "dynamic sampling": {"num_devices": 2},
    "several updates, recomputed old log-probs, entropy": {
        "num_devices": 4,
        "replicate_size": 2,
    },
    "PPO with a critic": {"num_devices": 2, "sequence_parallel_size": 2},
    "padded": {"num_devices": 2, "tensor_parallel_size": 2},
}


@pytest.mark.parametrize("what", SETTINGS)
def test_a_run_over_ranks_has_every_metric_of_one_rank(tmp_path, what):
    settings = {"task": {"eval_size": 3}, **SETTINGS[what]}
    expected = compared(run_one(sections_of(tmp_path, "one", **settings)))
    many = sections_of(tmp_path, "many", **settings, cluster=MESHES[what])
    launcher = "slurm" if what == "padded" else "torchrun"
    folders = run_placed(MESHES[what]["num_devices"], run_one, many, launcher=launcher)
    assert len(set(folders)) == 1
    assert_equal_metrics(compared(folders[0]), expected)


def test_each_of_a_hundred_held_out_rows_is_scored_once_on_eight_ranks(tmp_path):
    tiny_sections(tmp_path)
    rows = [{"prompt": f"w{index % 90} w{index // 90} w3", "answer": "w1"} for index in range(100)]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = sections_of(
        tmp_path,
        "eight",
        task={"eval_size": 100, "eval_path": str(held_out)},
        run={"num_steps": 1},
        cluster={"num_devices": 8},
    )
    folders = run_placed(8, run_one, sections)
    before, after = read_metrics(Path(folders[0]))
    assert before.metrics["eval/completions"] == after.metrics["eval/completions"] == 100
    assert after.metrics["eval/without_verdict"] == 0
    assert after.metrics["prompts/consumed"] == 4


def test_supervised_runs_with_adapters_over_ranks_have_every_metric_of_one_rank(tmp_path):
    settings = {"sft": {"max_steps": 2}, "train": {"lr": 1e-3, "eps": 1e-3}, "lora": {"rank": 2}}
    expected = compared(run_one_sft(sft_sections(tmp_path, **settings)))
    many = sft_sections(
        tmp_path,
        **settings,
        run={"name": "many"},
        cluster={"device": "cpu", "num_devices": 2},
        checkpoint={"export_hf": True},
    )
    folders = run_placed(2, run_one_sft, many)
    assert_equal_metrics(compared(folders[0]), expected)
    assert (Path(folders[0]) / "export" / "model.safetensors").exists()
    assert (Path(folders[0]) / "adapter" / "adapter_model.safetensors").exists()


def test_a_run_whose_replicas_compress_gradients_sends_less_and_samples_alike_until_the_first_update(
    tmp_path,
):
    found = {}
    for sync in ("exact", "int8"):
        sections = sections_of(
            tmp_path,
            sync,
            train={"gradient_sync": sync},
            cluster={"num_devices": 2, "replicate_size": 2, "shard_size": 1},
        )
        found[sync] = {
            record.step: record.metrics for record in read_metrics(Path(run_placed(2, run_one, sections)[0]))
        }
    exact, int8 = found["exact"], found["int8"]
    for step in (1, 2):
        assert 0 < int8[step]["gradient_sync/bytes"] < 0.5 * exact[step]["gradient_sync/bytes"]
        assert int8[step]["gradient_sync/held_back"] > 0 == exact[step]["gradient_sync/held_back"]
        assert int8[step]["updates/applied"] == exact[step]["updates/applied"] > 0
    assert int8[1]["reward/mean"] == exact[1]["reward/mean"]
    assert int8[1]["loss/total"] == pytest.approx(exact[1]["loss/total"], rel=1e-5, abs=1e-6)


def refuse_on_rank_1() -> list[str]:
    """A refusal by one rank alone, then one by all."""
    sections = {"model": {"path": "m"}, "task": {"name": "word_sorting"}}
    config = load_config(None, ["cluster.num_devices=2", "cluster.device=cpu"], sections=sections)
    said = []
    with placed(config) as place:
        for refusing in ([1], [0, 1]):
            try:
                with refused_together(place.mesh):
                    if place.mesh.rank in refusing:
                        raise ConfigError("model.path", "m", f"rank {place.mesh.rank} does not see it")
            except ConfigError as error:
                said.append(error.rule)
    return said


def test_what_one_rank_refuses_all_refuse():
    first, second = run_placed(2, refuse_on_rank_1)
    assert first == ["rank 1 does not see it", "rank 0 does not see it"]
    assert second == ["rank 1 does not see it", "rank 1 does not see it"]
