"""The remote reward against a real server: batches, limits, retries, and outages that never become a score."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from scoring_server import Drip, lengths, serving

from paceline.config.errors import ConfigError
from paceline.config.reward_schema import RemoteSource
from paceline.rewards.pool import reward_alarm
from paceline.rewards.remote import RemoteScorer
from paceline.types import RewardJob, Verdict

DOCUMENT = Path(__file__).parents[2] / "docs" / "rewards.md"


def scored(url: str, jobs: list[RewardJob], **settings: Any) -> tuple[list[Verdict], dict[str, int]]:
    scorer = RemoteScorer(RemoteSource(kind="remote", url=url, **{"backoff_s": 0.01, **settings}))
    try:
        pending = [scorer.submit(job) for job in jobs]
        scorer.flush()
        return [handle.result(20) for handle in pending], dict(scorer.take_counts())
    finally:
        scorer.close()


def jobs(count: int) -> list[RewardJob]:
    return [RewardJob(f"q{index}", "x" * index, "a", {"row": index}) for index in range(count)]


def test_scores_come_back_in_order_whatever_the_batches_and_their_order() -> None:
    def slow_first(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.2 if body["samples"][0]["completion"] == "" else 0.0)
        return lengths(body)

    with serving(slow_first) as service:
        verdicts, counts = scored(service.url, jobs(11), batch_size=4, concurrency=3)
    assert [verdict.score for verdict in verdicts] == list(range(11))
    assert sorted(len(body["samples"]) for body in service.requests) == [3, 4, 4]
    assert counts == {"requests": 3, "retries": 0}


def test_a_full_batch_leaves_before_the_rollout_ends() -> None:
    with serving() as service:
        scorer = RemoteScorer(RemoteSource(kind="remote", url=service.url, batch_size=2))
        first, _ = scorer.submit(jobs(2)[0]), scorer.submit(jobs(2)[1])
        assert first.result(20).score == 0  # without a flush
        scorer.close()


def test_the_request_holds_what_the_document_says() -> None:
    job = RewardJob("p", "c", None, {"day": date(2026, 1, 2)}, ({"role": "user", "content": "q"},))
    with serving() as service:
        scored(service.url, [job])
    assert service.requests == [
        {
            "samples": [
                {
                    "prompt": "p",
                    "messages": [{"role": "user", "content": "q"}],
                    "completion": "c",
                    "answer": None,
                    "metadata": {"day": "2026-01-02"},
                }
            ]
        }
    ]
    assert service.headers[0]["Content-Type"] == "application/json"


def test_no_more_requests_are_under_way_than_allowed() -> None:
    def slowly(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.05)
        return lengths(body)

    with serving(slowly) as service:
        verdicts, _ = scored(service.url, jobs(8), batch_size=1, concurrency=2)
    assert all(verdict.outcome == "score" for verdict in verdicts)
    assert service.most_parallel == 2


def test_a_service_that_is_down_is_an_error_and_an_alarm_and_no_zero() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/score"
        verdicts, counts = scored(url, jobs(3), retries=2)
    assert [(verdict.outcome, verdict.score) for verdict in verdicts] == [("error", None)] * 3
    assert "3 attempts" in verdicts[0].message and counts == {"requests": 1, "retries": 2}
    alarm = reward_alarm(verdicts)
    assert alarm is not None and "ConnectionRefusedError" in alarm


def test_a_service_that_recovers_is_asked_again() -> None:
    answers = iter([(503, "busy"), (500, "oops")])
    with serving(lambda body: next(answers, None) or lengths(body)) as service:
        verdicts, counts = scored(service.url, jobs(2))
    assert [verdict.score for verdict in verdicts] == [0, 1]
    assert counts == {"requests": 1, "retries": 2} and len(service.requests) == 3


@pytest.mark.parametrize("status", [302, 400, 401, 404])
def test_an_answer_that_would_be_the_same_again_is_not_asked_for_again(status: int) -> None:
    with serving(lambda body: (status, {"detail": "no"})) as service:
        verdicts, _ = scored(service.url, jobs(1))
    assert verdicts[0].outcome == "error" and f"status {status}" in verdicts[0].message
    assert len(service.requests) == 1


@pytest.mark.parametrize("answer", [Drip(5.0), None], ids=["byte by byte", "silent"])
def test_a_request_ends_at_its_limit_as_a_timeout_and_is_not_repeated(answer: Drip | None) -> None:
    release = threading.Event()

    def never(body: dict[str, Any]) -> tuple[int, Any]:
        if answer is None:
            release.wait(10)
        return 200, answer or {}

    with serving(never) as service:
        started = time.monotonic()
        verdicts, _ = scored(service.url, jobs(2), timeout_s=0.4)
        release.set()
    assert [(verdict.outcome, verdict.score) for verdict in verdicts] == [("timeout", None)] * 2
    assert (
        time.monotonic() - started < 4.0 and len(service.requests) == 1
    )  # far from the 5 s that it would take


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"<html>", "not JSON"),
        ([1.0, 2.0], "scores"),
        ({"scores": [1.0]}, "2 numbers"),
        ({"scores": {"a": 1}}, "2 numbers"),
    ],
)
def test_an_answer_that_cannot_be_read_is_an_error_for_its_samples(answer: Any, message: str) -> None:
    with serving(lambda body: (200, answer)) as service:
        verdicts, _ = scored(service.url, jobs(2))
    assert [verdict.outcome for verdict in verdicts] == ["error", "error"]
    assert message in verdicts[0].message


def test_one_sample_without_a_number_leaves_the_others_their_scores() -> None:
    answer = b'{"scores": [0, null, "1", true, NaN, -1e39, 0.5], "messages": ["", "no verdict", "", "", "", "", ""]}'
    with serving(lambda body: (200, answer)) as service:
        verdicts, _ = scored(service.url, jobs(7))
    assert [verdict.score for verdict in verdicts] == [0.0, None, None, None, None, None, 0.5]
    assert verdicts[1].message == "no verdict"


def test_metadata_that_json_cannot_hold_is_an_error_before_anything_is_sent() -> None:
    with serving() as service:
        verdicts, _ = scored(service.url, [RewardJob("p", "c", None, {"x": float("nan")})])
    assert verdicts[0].outcome == "error" and not service.requests


def test_the_header_comes_from_the_environment_and_stays_out_of_messages(monkeypatch: Any) -> None:
    monkeypatch.setenv("SANDBOX_AUTH", "Bearer hunter2")
    with serving(lambda body: (401, {"detail": "Bearer hunter2 is not welcome"})) as service:
        verdicts, _ = scored(service.url, jobs(1), auth_env="SANDBOX_AUTH")
    assert service.headers[0]["Authorization"] == "Bearer hunter2"
    assert "hunter2" not in verdicts[0].message and "***" in verdicts[0].message


def test_a_missing_or_broken_variable_is_refused_before_a_rollout(monkeypatch: Any) -> None:
    source = RemoteSource(kind="remote", url="https://host/x", auth_env="NO_SUCH_VARIABLE")
    with pytest.raises(ConfigError) as caught:
        RemoteScorer(source, "reward.sources.a.auth_env")
    assert caught.value.key == "reward.sources.a.auth_env"
    monkeypatch.setenv("NO_SUCH_VARIABLE", "a\nb")
    with pytest.raises(ConfigError, match="line break"):
        RemoteScorer(source)


def test_closing_does_not_wait_for_a_service_that_hangs() -> None:
    release = threading.Event()

    def hang(body: dict[str, Any]) -> tuple[int, Any]:
        release.wait(30)
        return lengths(body)

    with serving(hang) as service:
        scorer = RemoteScorer(
            RemoteSource(kind="remote", url=service.url, batch_size=1, timeout_s=30, backoff_s=30)
        )
        pending = scorer.submit(jobs(1)[0])
        while not service.requests:
            time.sleep(0.01)
        started = time.monotonic()
        scorer.close()
        assert pending.result(0).score is None and time.monotonic() - started < 10.0
        release.set()


def test_the_documents_server_speaks_the_wire_format(tmp_path: Path) -> None:
    (code,) = re.findall(
        r"```python\n(# reward_server.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(code.strip().splitlines()) <= 20
    script = tmp_path / "reward_server.py"
    script.write_text(code)
    with subprocess.Popen([sys.executable, str(script), "0"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())
            verdicts, _ = scored(url, [RewardJob("p", "the answer is 42", "42"), RewardJob("p", "41", "42")])
        finally:
            server.kill()
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0]
