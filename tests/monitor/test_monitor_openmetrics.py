"""The endpoint's text holds to OpenMetrics, says what the records say, and the dashboard asks for nothing else."""

import json
import math
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
from monitor_runs import STAGES, GrowingRun
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from paceline.config import ConfigError
from paceline.monitor.families import all_families, place_of
from paceline.monitor.following import follow
from paceline.monitor.openmetrics import CONTENT_TYPE, exposition
from paceline.monitor.server import MetricsServer
from paceline.telemetry.metric_schema import METRICS, spec_of

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "paceline.json"

Labels = tuple[tuple[str, str], ...]


def parsed(text: str) -> dict[str, dict[Labels, float]]:
    """Values by sample name and labels, without the run's; the parser refuses what is not OpenMetrics."""
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "run"))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def grown(tmp_path: Path) -> GrowingRun:
    run = GrowingRun(tmp_path / "r")
    run.steps(1, 4)
    run.summary("running")
    return run


def test_the_text_is_openmetrics_and_says_what_the_records_say(tmp_path: Path) -> None:
    values = parsed(exposition(follow(grown(tmp_path).run_dir)))
    assert values["paceline_step"][()] == 4
    assert values["paceline_steps_planned"][()] == 20
    assert values["paceline_run_status"][(("paceline_run_status", "running"),)] == 1
    assert sum(values["paceline_run_status"].values()) == 1
    assert values["paceline_reward_mean"][()] == 0.5
    assert values["paceline_step_time_seconds"][()] == 1.0
    assert values["paceline_stage_time_seconds"][(("stage", "rollout"),)] == 0.6
    assert values["paceline_throughput_per_device_tokens_per_second"][()] == 450
    assert values["paceline_sum_tokens_response_total"][()] == 400
    assert values["paceline_sum_checkpoint_blocked_seconds_total"][()] == 1.0


def test_every_rank_has_its_own_times(tmp_path: Path) -> None:
    values = parsed(exposition(follow(grown(tmp_path).run_dir)))
    for rank in ("0", "1"):
        assert values["paceline_rank_step_seconds"][(("rank", rank),)] == pytest.approx(1.0)
        for stage, seconds in STAGES.items():
            labels = (("rank", rank), ("stage", stage))
            assert values["paceline_rank_stage_seconds"][labels] == pytest.approx(seconds)
            assert values["paceline_sum_rank_stage_seconds_total"][labels] == pytest.approx(4 * seconds)
            assert values["paceline_sum_rank_stage_tokens_total"][labels] == 40 * (int(rank) + 1)


def test_a_counter_never_falls_when_a_run_is_resumed(tmp_path: Path) -> None:
    run = grown(tmp_path)
    follower = follow(run.run_dir)
    before = parsed(exposition(follower))
    run.process()
    run.steps(2, 3)
    follower.poll()
    after = parsed(exposition(follower))
    assert after["paceline_step"][()] == 3
    totals = [name for name in before if name.endswith("_total")]
    assert totals
    for name in totals:
        assert all(after[name][labels] >= value for labels, value in before[name].items())


def test_names_and_texts_that_need_escaping_arrive(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / 'a "quoted"\\name')
    run.step(1)
    names = {
        sample.labels["run"]
        for family in text_string_to_metric_families(exposition(follow(run.run_dir)))
        for sample in family.samples
    }
    assert names == {run.run_dir.name}


def test_values_that_are_no_numbers_are_written_as_openmetrics_has_them(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r")
    run.step(1, grad_norm=math.inf, loss__total=math.nan, lr=-math.inf)
    values = parsed(exposition(follow(run.run_dir)))
    assert values["paceline_grad_norm"][()] == math.inf
    assert math.isnan(values["paceline_loss_total_nats"][()])
    assert values["paceline_lr"][()] == -math.inf


def test_an_alarm_is_a_sample(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r")
    run.step(1, samples__overlong=1)
    values = parsed(exposition(follow(run.run_dir)))
    assert values["paceline_alarm"] == {(("alarm", "overlong"), ("metric", "samples/overlong")): 1}


def test_metrics_of_a_newer_version_are_counted_and_not_shown(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r")
    line = {"v": 1, "step": 1, "time": 0.0, "metrics": {"warp/factor": 9, "reward/mean": 0.5}}
    with (run.run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    values = parsed(exposition(follow(run.run_dir)))
    assert values["paceline_undeclared_metrics"][()] == 1
    assert values["paceline_reward_mean"][()] == 0.5


def test_every_declared_metric_has_a_family_of_its_own() -> None:
    seen: dict[tuple[str, Labels], str] = {}
    for name, spec in METRICS.items():
        place = place_of(spec)
        for family in (place.gauge, place.total):
            if family is None:
                continue
            assert re.fullmatch(r"paceline_[a-z][a-z0-9_]*", family.name), name
            assert not family.unit or family.name.endswith(f"_{family.unit}")
            key = (family.name, tuple(place.labels.items()))
            assert key not in seen, f"{name} and {seen.get(key)} are both {key}"
            seen[key] = name


def test_every_declared_metric_survives_the_parser(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r")
    recorded = {name.replace("<source>", "judge").replace("/", "__"): 1.0 for name in METRICS}
    run.step(1, **recorded)
    values = parsed(exposition(follow(run.run_dir)))
    for name in recorded:
        place = place_of(spec_of(name.replace("__", "/")))
        labels = tuple(sorted(place.labels.items()))
        assert labels in values[place.gauge.sample_name], name
        assert place.total is None or labels in values[place.total.sample_name]
    assert values["paceline_reward_source_mean"] == {(("source", "judge"),): 1.0}


def get(url: str) -> tuple[int, Mapping[str, str], str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()


def test_a_scrape_sees_what_was_written_since_the_one_before(tmp_path: Path) -> None:
    run = grown(tmp_path)
    with MetricsServer(run.run_dir, 0) as server:
        assert server.url.startswith("http://127.0.0.1:")
        status, headers, text = get(server.url)
        assert status == 200
        assert headers["Content-Type"] == CONTENT_TYPE
        assert parsed(text)["paceline_step"][()] == 4
        run.step(5)
        assert parsed(get(server.url)[2])["paceline_step"][()] == 5
        assert get(server.url.replace("/metrics", "/secrets"))[0] == 404


def test_records_that_cannot_be_read_are_an_error_of_the_scrape_only(tmp_path: Path) -> None:
    run = grown(tmp_path)
    with MetricsServer(run.run_dir, 0) as server:
        metrics = run.run_dir / "metrics.jsonl"
        whole = metrics.read_text()
        metrics.write_text('{"v": 99, "step": 1, "time": 0, "metrics": {}}\n')
        status, _, text = get(server.url)
        assert status == 500
        assert "version 99" in text
        metrics.write_text(whole)
        assert get(server.url)[0] == 200


def test_a_port_that_is_taken_is_refused_with_one_that_is_free(tmp_path: Path) -> None:
    run = grown(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            MetricsServer(run.run_dir, port)
    assert refused.value.key == "telemetry.metrics_port"
    assert refused.value.nearest is not None and int(refused.value.nearest) > port


def queries(node: object) -> list[str]:
    """Every expression and variable query of a dashboard."""
    if isinstance(node, dict):
        own = [node[key] for key in ("expr", "definition") if key in node]
        return own + [query for value in node.values() for query in queries(value)]
    if isinstance(node, list):
        return [query for value in node for query in queries(value)]
    return []


def test_the_dashboard_asks_only_for_what_the_endpoint_shows() -> None:
    families = {family.sample_name: family for family in all_families().values()}
    asked = queries(json.loads(DASHBOARD.read_text(encoding="utf-8")))
    assert len(asked) > 20
    for query in asked:
        named = re.findall(r"(paceline_\w+)(?:\{([^}]*)\})?", query.replace('"$run"', '""'))
        for name, selectors in named:
            if name == "paceline_run_status" and not selectors:
                continue  # in a legend
            assert name in families, f"{query}: there is no {name}"
            known = {"run", *families[name].labels}
            assert set(re.findall(r"(\w+)\s*(?:=|!)", selectors)) <= known, query


def test_the_dashboard_sums_only_counters_over_time() -> None:
    kinds = {family.sample_name: family.kind for family in all_families().values()}
    for query in queries(json.loads(DASHBOARD.read_text(encoding="utf-8"))):
        for name in re.findall(r"(?:increase|rate)\((\w+)", query):
            assert kinds[name] == "counter", query
