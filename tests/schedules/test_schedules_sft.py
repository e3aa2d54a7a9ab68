"""Supervised runs: they learn, leave the records of any run, resume bit-equal, and refuse what would have no effect."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import ROLLOUT_CLOCKS, WORDS, write_tiny_model
from transformers import AutoModelForCausalLM

import paceline
from paceline.cli import main
from paceline.cli.doctor import examine
from paceline.config import ConfigError, load_config, load_sft_config
from paceline.config.schema import Config
from paceline.config.sft import UNUSED_KEYS, UNUSED_SECTIONS
from paceline.report import report_figures, write_report
from paceline.schedules import run_sft, run_training, sft_recorder
from paceline.telemetry.metrics import read_metrics
from paceline.telemetry.records import read_ledger

RECIPE = Path(__file__).parents[2] / "recipes" / "sft.yaml"


def write_rows(path, count=40):
    """A fixed map from a word to two others: learnable by heart in a few epochs."""
    rows = [
        {"prompt": WORDS[index], "completion": f"{WORDS[index + 1]} {WORDS[index // 2]}"}
        for index in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sft_sections(tmp_path, **changes):
    if not (tmp_path / "model").exists():
        write_tiny_model(tmp_path / "model")
        (tmp_path / "template.jinja").write_text(
            "{% for m in messages %}{{ m['content'] }} </s> {% endfor %}"
        )
        write_rows(tmp_path / "rows.jsonl")
    sections = {
        "run": {"name": "s", "dir": str(tmp_path / "runs")},
        "model": {"path": str(tmp_path / "model"), "chat_template": str(tmp_path / "template.jinja")},
        "task": {"path": str(tmp_path / "rows.jsonl"), "eval_size": 8},
        "batch": {"num_prompts": 8, "token_budget": 256},
        "train": {"lr": 3e-3},
        "telemetry": {"live": "off"},
    }
    for name, values in changes.items():
        sections[name] = {**sections.get(name, {}), **values}
    return sections


def train(tmp_path, **changes):
    return run_sft(load_sft_config(None, sections=sft_sections(tmp_path, **changes)))


def learned(run_dir):
    shapes = ("batch/new_shapes", "batch/distinct_shapes")  # a resumed process meets every shape anew
    skipped = ("time/", "throughput/", "memory/", "tflops/", "mfu/", "checkpoint/", *ROLLOUT_CLOCKS, *shapes)
    return {
        record.step: {name: value for name, value in record.metrics.items() if not name.startswith(skipped)}
        for record in read_metrics(run_dir)
    }


def masters(run_dir, step):
    return load_file(run_dir / "checkpoints" / f"step_{step}" / "masters.safetensors")


@pytest.mark.parametrize("lora", [{}, {"rank": 8}], ids=["full", "lora"])
def test_a_run_learns_and_leaves_the_records_of_any_run(tmp_path, lora):
    lr = {"lr": 1e-2} if lora else {}
    result = train(tmp_path, sft={"num_epochs": 6}, lora=lora, train=lr, task={"eval_size": 0})
    # 40 rows, 6 epochs, 8 rows an update
    assert result.summary["status"] == "completed" and result.summary["num_steps"] == 30
    records = read_metrics(result.run_dir)
    assert [record.step for record in records] == list(range(31))
    losses = [record.metrics["loss/total"] for record in records[1:]]
    assert losses[-1] < 0.5 * losses[0]
    for record in records[1:]:
        assert record.metrics["updates/applied"] == 1 and record.metrics["rows/learned"] == 8
        assert record.metrics["tokens/loss"] == 24  # two words and the end token, eight times
    (rank,) = read_ledger(result.run_dir)
    for step in rank.steps():
        covered = sum(stage.self_s for stage in step.stages.values())
        assert covered + step.unaccounted_s == pytest.approx(step.wall_s)
        assert {"data", "update_actor"} <= step.stages.keys()
    names = {path.name for path in result.run_dir.iterdir()}
    assert {"config.yaml", "env.json", "metrics.jsonl", "summary.json", "ledger", "checkpoints"} <= names
    assert json.loads((result.run_dir / "env.json").read_text())["features"]["liger"] is False


def test_the_held_out_loss_is_measured_before_during_and_after(tmp_path):
    result = train(tmp_path, run={"eval_every": 2}, sft={"num_epochs": 2})
    evaluated = {
        step: values["eval/loss"] for step, values in learned(result.run_dir).items() if "eval/loss" in values
    }
    assert list(evaluated) == [0, 2, 4, 6, 8]
    assert result.summary["eval_loss_before"] == evaluated[0]
    assert result.summary["perplexity_after"] == pytest.approx(math.exp(evaluated[8]))
    assert result.summary["num_eval_rows"] == 8


def test_the_last_update_takes_the_rows_that_are_left(tmp_path):
    result = train(tmp_path, batch={"num_prompts": 7}, sft={"num_epochs": 2}, task={"eval_size": 0})
    taken = [values["rows/learned"] for step, values in learned(result.run_dir).items() if step]
    assert taken == [7] * 11 + [3]
    assert sum(taken) == 80


def test_max_steps_ends_the_run_early(tmp_path):
    result = train(tmp_path, sft={"num_epochs": 9, "max_steps": 2}, task={"eval_size": 0})
    assert result.summary["status"] == "completed" and result.summary["num_steps"] == 2


@pytest.mark.parametrize("lora", [{}, {"rank": 4}], ids=["full", "lora"])
def test_a_stopped_run_resumes_bit_equal_to_an_uninterrupted_one(tmp_path, monkeypatch, lora):
    changes = {"lora": lora, "train": {"lr_schedule": "cosine", "warmup_steps": 2}, "sft": {"num_epochs": 2}}
    whole = train(tmp_path, run={"name": "whole"}, **changes)
    original = sft_recorder.SftRecorder.rows

    def stop_in_step_3(self, rows):
        original(self, rows)
        if self._run.state.step == 2:
            self._run.stop.request()

    with monkeypatch.context() as patched:
        patched.setattr(sft_recorder.SftRecorder, "rows", stop_in_step_3)
        stopped = train(tmp_path, run={"name": "cut"}, **changes)
    assert stopped.summary["status"] == "stopped" and stopped.summary["num_steps"] == 3
    cut = train(tmp_path, run={"name": "cut"}, **changes)
    assert cut.summary["status"] == "completed"
    assert learned(cut.run_dir) == learned(whole.run_dir)
    for name, tensor in masters(whole.run_dir, 8).items():
        assert torch.equal(masters(cut.run_dir, 8)[name], tensor)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"batch": {"num_prompts": 8}}, {"batch": {"num_prompts": 5}}, [8, 8, 5, 5, 5, 5, 4]),
        ({"batch": {"num_prompts": 5}}, {"batch": {"num_prompts": 20}}, [5, 5, 20, 10]),
        # the first epoch ends with a short update
        (
            {"batch": {"num_prompts": 16}},
            {"batch": {"num_prompts": 16}, "sft": {"num_epochs": 2}},
            [16, 16, 8],
        ),
    ],
    ids=["fewer", "more", "epochs"],
)
def test_a_resume_with_other_batches_or_more_epochs_learns_every_row_equally_often(
    tmp_path, before, after, expected
):
    whole = after.get("sft", {}).get("num_epochs", 1) > 1
    train(tmp_path, **before, task={"eval_size": 0}, sft={} if whole else {"max_steps": 2})
    result = train(tmp_path, **after, task={"eval_size": 0}, train={"lr_schedule": "linear"})
    taken = [values["rows/learned"] for step, values in learned(result.run_dir).items() if step]
    if whole:
        expected = [*expected, 16, 16, 8]
    assert taken == expected and result.summary["status"] == "completed"
    assert result.summary["num_steps"] == result.summary["num_steps_planned"] == len(expected)
    rates = [values["lr"] for step, values in learned(result.run_dir).items() if step]
    assert rates[-1] == pytest.approx(3e-3 / len(expected))  # the decay still ends with the run


def test_a_held_out_loss_too_large_for_a_perplexity_does_not_end_the_run(tmp_path):
    sections = sft_sections(tmp_path, model={"verify_packing": False}, checkpoint={"every": 1})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        model.get_input_embeddings().weight *= 3000  # tied to the head: logits of thousands
    model.save_pretrained(tmp_path / "model")
    result = run_sft(load_sft_config(None, sections={**sections, "sft": {"max_steps": 1}}))
    assert learned(result.run_dir)[0]["eval/perplexity"] == math.inf
    assert result.summary["eval_loss_before"] > 700 and result.summary["perplexity_before"] is None
    assert (result.run_dir / "checkpoints" / "step_1").is_dir()
    assert report_figures(result.run_dir)["status"] == "completed"
    write_report(result.run_dir)


def test_rows_left_out_are_in_the_metrics_the_summary_and_the_report(tmp_path):
    result = train(
        tmp_path,
        task={"eval_size": 0, "path": str(_with_long_rows(tmp_path))},
        sft={"max_length": 12, "overlong": "drop"},
    )
    assert learned(result.run_dir)[0]["rows/overlong_dropped"] == 3
    assert result.summary["rows"]["overlong_dropped"] == 3 and result.summary["num_rows"] == 40
    assert report_figures(result.run_dir)["counters"]["rows/overlong_dropped"] == 3


def _with_long_rows(tmp_path):
    path = write_rows(tmp_path / "long.jsonl")
    long = json.dumps({"prompt": "w1", "completion": " ".join(WORDS[:30])}) + "\n"
    path.write_text(path.read_text() + 3 * long)
    return path


def test_the_report_shows_loss_and_perplexity_and_no_rewards(tmp_path):
    result = train(tmp_path, sft={"num_epochs": 2})
    figures = report_figures(result.run_dir)
    assert figures["eval_loss_before"] > figures["eval_loss_after"] and figures["perplexity_after"] > 1
    assert figures["algorithm"] == "sft" and figures["reward_first"] is None
    page = write_report(result.run_dir).read_text()
    assert "Held-out loss" in page and "perplexity" in page.lower()
    for absent in ("Held-out accuracy", "Policy loss", '"key": "reward"', "Old log-probs"):
        assert absent not in page


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"run": {"num_steps": 7}}, "run.num_steps"),
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature"),
        ({"algorithm": {"name": "dapo"}}, "algorithm.name"),
        ({"algorithm": {"kl_coefficient": 0.1}}, "algorithm.kl_coefficient"),
        ({"batch": {"num_samples": 4}}, "batch.num_samples"),
        ({"task": {"reward": "math"}}, "task.reward"),
        ({"critic": {"lr": 1.0}}, "critic.lr"),
        ({"reward": {"sources": {"a": {"kind": "rule", "weight": 2.0}}}}, "reward.sources"),
        ({"sft": {"epochs": 1}}, "sft.epochs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_without_effect_are_refused(tmp_path, changes, key):
    with pytest.raises(ConfigError) as refused:
        load_sft_config(None, sections=sft_sections(tmp_path, **changes))
    assert refused.value.key == key


def test_every_section_is_accounted_for_as_used_or_unused():
    """A new section must say whether it acts in `paceline sft`: use it, or refuse it in config/sft.py."""
    used = {
        "run",
        "model",
        "lora",
        "task",
        "batch",
        "train",
        "sft",
        "schedule",
        "checkpoint",
        "telemetry",
        "cluster",
    }
    refused = {"algorithm", "critic", *UNUSED_SECTIONS}
    assert set(Config.model_fields) == used | refused
    for section, keys in UNUSED_KEYS.items():
        assert keys.keys() <= Config.model_fields[section].annotation.model_fields.keys()


def test_each_command_refuses_the_others_settings(tmp_path, capsys):
    sections = sft_sections(tmp_path)
    with pytest.raises(ConfigError, match="paceline sft"):
        load_config(None, sections={**sections, "sft": {"num_epochs": 3}})
    config = load_sft_config(None, sections=sections)
    with pytest.raises(ConfigError, match="paceline sft"):
        run_training(config)
    with pytest.raises(ConfigError, match="paceline train"):
        load_sft_config(None, ["schedule.name=sync", "rollout.max_new_tokens=8"], sections=sections)


def test_the_longest_row_must_fit_the_budget(tmp_path):
    with pytest.raises(ConfigError, match="longest row") as refused:
        train(tmp_path, batch={"token_budget": 3})
    assert refused.value.key == "batch.token_budget"
    with pytest.raises(ConfigError, match="updates"):
        train(tmp_path, run={"name": "w"}, train={"warmup_steps": 100})


def test_the_command_line_counts_rows_trains_and_refuses(tmp_path, capsys):
    sections = sft_sections(tmp_path)
    overrides = [
        f"{section}.{key}={json.dumps(value) if not isinstance(value, str) else value}"
        for section, values in sections.items()
        for key, value in values.items()
    ]
    assert main(["sft", *overrides, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "updates in all   4 on 32 rows" in shown
    assert "memory per device" in shown and "KV cache" not in shown
    assert not (tmp_path / "runs").exists()
    assert main(["sft", *overrides, "algorithm.name=grpo", "sft.max_steps=1"]) == 0
    assert "run: " in capsys.readouterr().out
    assert main(["sft", *overrides, "sft.num_epoch=1"]) == 2
    assert "sft.num_epochs" in capsys.readouterr().err


def test_a_finished_run_is_a_recipe_for_another_and_python_runs_it_too(tmp_path):
    first = paceline.sft(**sft_sections(tmp_path))
    again = paceline.sft(first.dir / "config.yaml", run={"name": "again"})
    assert learned(again.dir) == learned(first.dir)
    assert again.figures()["eval_loss_after"] == first.figures()["eval_loss_after"]


def test_the_doctor_looks_at_a_supervised_recipe_as_one(tmp_path):
    checks = {check.name: check for check in examine(str(RECIPE), [])}
    assert "16 rows per update" in checks["recipe"].found
    assert "task.reward_workers" not in checks


def test_train_refuses_a_supervised_recipe(capsys):
    assert main(["train", str(RECIPE), "--dry-run"]) == 2
    assert "paceline sft" in capsys.readouterr().err


def test_a_chat_template_that_is_not_there_is_refused(tmp_path):
    sections = sft_sections(tmp_path, model={"chat_template": str(tmp_path / "none.jinja")})
    with pytest.raises(ConfigError, match=r"model\.chat_template = '.*none\.jinja': cannot be read"):
        run_sft(load_sft_config(sections=sections))


def test_the_recipe_for_a_file_of_rows_trains_on_it(tmp_path):
    sections = sft_sections(tmp_path)
    kept = {name: sections[name] for name in ("run", "model", "telemetry")}
    overrides = [f"task.path={tmp_path / 'rows.jsonl'}", "task.eval_size=4", "batch.num_prompts=8"]
    config = load_sft_config(RECIPE.with_name("sft-own-data.yaml"), overrides, sections=kept)
    summary = run_sft(config).summary
    assert summary["status"] == "completed"
    assert summary["eval_loss_after"] < summary["eval_loss_before"]


@pytest.mark.parametrize("lora", [{}, {"rank": 8}], ids=["full", "lora"])
def test_the_recipe_learns_at_reduced_size(tmp_path, lora):
    """On the recipe's own generated rows; words the tiny tokenizer does not know are <unk>, which is soon learned."""
    write_tiny_model(tmp_path / "model")
    config = load_sft_config(
        RECIPE,
        sections={
            "run": {"dir": str(tmp_path / "runs"), "eval_every": 0},
            "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
            "lora": lora,
            "task": {"size": 64, "eval_size": 16},
            "batch": {"num_prompts": 8},
            "sft": {"num_epochs": 2},
            "train": {"lr": 1e-2},
            "telemetry": {"live": "off"},
        },
    )
    summary = run_sft(config).summary
    assert summary["eval_loss_after"] < 0.2 * summary["eval_loss_before"]
