"""TensorBoard and W&B get what metrics.jsonl gets; a missing package is one clear refusal."""

import math
import sys

import pytest

from paceline.config.errors import ConfigError
from paceline.telemetry.metrics import MetricLog
from paceline.telemetry.sinks import check_sinks, open_sinks


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # how Python marks a module that cannot be imported
    for refuse in (lambda: check_sinks([name]), lambda: open_sinks([name], tmp_path, "run", {})):
        with pytest.raises(ConfigError) as caught:
            refuse()
        assert caught.value.key == "telemetry.sinks"
        assert f"pip install 'paceline[{name}]'" in str(caught.value)


def test_every_missing_package_is_named_at_once(monkeypatch):
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as caught:
        check_sinks(["tensorboard", "wandb"])
    assert len(caught.value.problems) == 2


def test_an_unknown_sink_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="tensorboard, wandb"):
        check_sinks(["mlflow"])


def test_no_sink_asked_for_needs_no_package(tmp_path):
    assert open_sinks([], tmp_path, "run", {}) == []


def test_tensorboard_shows_every_step_also_of_a_resumed_run(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    for steps in ((1, 2), (3,)):
        with MetricLog(tmp_path, open_sinks(["tensorboard"], tmp_path, "run", {})) as log:
            for step in steps:
                log.record(step, {"reward/mean": step / 4, "grad_norm": math.nan})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    rewards = [
        (event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors("reward/mean")
    ]
    assert rewards == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert math.isnan(make_ndarray(events.Tensors("grad_norm")[0].tensor_proto))


def test_wandb_writes_an_offline_run_below_the_runs_folder(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with MetricLog(tmp_path, open_sinks(["wandb"], tmp_path, "run", {"train": {"lr": 1e-6}})) as log:
        log.record(1, {"reward/mean": 0.5})
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
