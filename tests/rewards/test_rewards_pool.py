import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.rewards.pool import RewardPool, RewardPoolError, reward_alarm
from paceline.types import RewardJob, RewardSpec, Verdict

OBEY = RewardSpec("rewards_to_score:obey")


def jobs(*completions: str) -> list[RewardJob]:
    return [RewardJob("prompt", completion) for completion in completions]


def children_of(pid: int) -> set[int]:
    """Live (not zombie) child processes."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], limit_s: float = 20.0) -> bool:
    give_up = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(scope="module")
def pool():
    with RewardPool(OBEY, num_workers=2, timeout_s=20.0) as shared:
        yield shared


def test_verdicts_come_back_in_the_order_of_the_jobs(pool):
    verdicts = pool.score(jobs(*(str(number) for number in range(500))))
    assert [verdict.score for verdict in verdicts] == [float(number) for number in range(500)]


def test_no_jobs_give_no_verdicts(pool):
    assert pool.score([]) == []


def test_a_raise_is_an_error_with_type_message_and_place_and_never_a_zero(pool):
    (verdict,) = pool.score(jobs("raise"))
    assert verdict.outcome == "error"
    assert verdict.score is None
    assert verdict.message.startswith("RuntimeError: the sandbox is down (")
    assert "rewards_to_score.py:" in verdict.message


@pytest.mark.parametrize(
    ("completion", "what"),
    [
        ("none", "NoneType"),
        ("text", "'1.0' of type str"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("-4e38", "float32"),
    ],
)
def test_anything_but_a_finite_number_is_an_error_that_shows_it(pool, completion, what):
    (verdict,) = pool.score(jobs(completion))
    assert verdict.outcome == "error"
    assert what in verdict.message


def test_true_counts_as_one(pool):
    assert pool.score(jobs("bool"))[0].score == 1.0


def test_a_grader_that_calls_sys_exit_is_an_error_and_its_worker_stays(pool):
    num_replaced = pool.num_replaced
    first, second = pool.score(jobs("sys_exit", "1"))
    assert (first.outcome, second.score) == ("error", 1.0)
    assert pool.num_replaced == num_replaced


@pytest.mark.parametrize(("completion", "what"), [("exit", "exited with code 3"), ("segfault", "SIGSEGV")])
def test_a_worker_that_dies_makes_its_job_an_error_and_is_replaced(pool, completion, what):
    num_replaced = pool.num_replaced
    verdicts = pool.score(jobs("1", completion, *["2"] * 30))
    assert verdicts[1].outcome == "error"
    assert what in verdicts[1].message
    assert [verdict.score for verdict in verdicts[2:]] == [2.0] * 30
    assert pool.num_replaced == num_replaced + 1


def test_a_worker_that_gets_an_interrupt_scores_on(pool):
    assert pool.score(jobs("interrupt"))[0].score == 1.0


def test_workers_do_not_load_torch(pool):
    assert pool.score(jobs("torch_loaded"))[0].score == 0.0


def test_rewards_run_in_the_main_thread_of_their_worker(pool):
    assert pool.score(jobs("main_thread"))[0].score == 1.0


def test_scoring_from_another_thread_gives_the_score(pool):
    found: list[Verdict] = []
    thread = threading.Thread(target=lambda: found.extend(pool.score(jobs("1.0"))))
    thread.start()
    thread.join()
    assert found[0].score == 1.0


def test_submitted_jobs_are_scored_while_the_caller_does_something_else(pool):
    handles = [pool.submit(job) for job in jobs("3", "raise", "4")]
    assert wait_until(lambda: all(handle.done() for handle in handles))
    assert [verdict.score for verdict in pool.gather(handles)] == [3.0, None, 4.0]


def test_a_job_that_cannot_cross_to_a_worker_is_the_callers_error(pool):
    with pytest.raises((TypeError, AttributeError)):
        pool.submit(RewardJob("prompt", "1", metadata={"lock": threading.Lock()}))


def test_eight_outcomes_arrive_within_the_limit_of_the_one_that_hangs():
    with RewardPool(OBEY, num_workers=4, timeout_s=0.5) as pool:
        pool.score(jobs(*["1"] * 16))  # workers are up
        started = time.perf_counter()
        verdicts = pool.score(jobs("1", "1", "hang", "1", "1", "1", "1", "1"))
        seconds = time.perf_counter() - started
    assert [verdict.outcome for verdict in verdicts] == ["score"] * 2 + ["timeout"] + ["score"] * 5
    assert verdicts[2].score is None
    assert 0.5 <= verdicts[2].seconds < 2.0
    assert seconds < 2.5


def test_a_grader_that_hangs_inside_the_interpreter_is_killed_too():
    with RewardPool(OBEY, num_workers=1, timeout_s=0.3) as pool:
        verdicts = pool.score(jobs("hang_holding_the_lock", "1"))
    assert [verdict.outcome for verdict in verdicts] == ["timeout", "score"]


def test_every_round_with_a_hang_leaves_exactly_the_workers_and_nothing_else():
    with RewardPool(OBEY, num_workers=4, timeout_s=0.05) as pool:
        before = children_of(os.getpid()) - set(pool.worker_pids)
        for _ in range(100):
            verdicts = pool.score(jobs("hang", "1"))
            assert verdicts[0].outcome == "timeout"
        assert wait_until(lambda: len(pool.worker_pids) == 4)
        assert pool.num_replaced >= 100
        assert children_of(os.getpid()) - before == set(pool.worker_pids)
        pids = pool.worker_pids
    assert not any(is_alive(pid) for pid in pids)


def test_a_timeout_ends_what_the_grader_had_started(tmp_path):
    pid_file = tmp_path / "pid"
    with RewardPool(OBEY, num_workers=1, timeout_s=0.5) as pool:
        assert pool.score(jobs(f"hang_with_child {pid_file}"))[0].outcome == "timeout"
    assert wait_until(lambda: not is_alive(int(pid_file.read_text())))


def test_jobs_sent_along_with_a_hanging_one_are_each_scored_once(tmp_path):
    log = tmp_path / "log"
    with RewardPool(OBEY, num_workers=1, timeout_s=0.5) as pool:
        pool.score(jobs(*["1"] * 50))  # short jobs: the next ones are sent many at a time
        verdicts = pool.score(jobs(*[f"count {log}"] * 10, "hang", *[f"count {log}"] * 10))
    assert [verdict.outcome for verdict in verdicts] == ["score"] * 10 + ["timeout"] + ["score"] * 10
    assert log.read_text() == "x" * 20


def test_the_constructor_does_not_wait_for_the_workers(tmp_path, monkeypatch):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    # Its import waits until this test opens the other end, after the constructor has returned.
    (tmp_path / "slow_to_import.py").write_text(
        f"open({str(gate)!r}).read()\ndef score(completion):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with RewardPool(RewardSpec("slow_to_import:score"), num_workers=1, timeout_s=5.0) as pool:
        handle = pool.submit(jobs("1")[0])
        gate.open("w").close()
        assert pool.gather([handle])[0].score == 1.0


def test_a_reward_that_workers_cannot_import_is_reported_to_whoever_waits():
    with (
        RewardPool(RewardSpec("no_such_module:score"), num_workers=2, timeout_s=5.0) as pool,
        pytest.raises(RewardPoolError, match="no_such_module"),
    ):
        pool.score(jobs("1"))


def test_a_closed_pool_refuses_jobs_and_fails_those_without_a_verdict():
    pool = RewardPool(OBEY, num_workers=1, timeout_s=60.0)
    handle = pool.submit(jobs("hang")[0])
    pool.close()
    pool.close()
    with pytest.raises(RewardPoolError, match="closed"):
        pool.gather([handle])
    with pytest.raises(RewardPoolError, match="closed"):
        pool.submit(jobs("1")[0])


def test_what_rewards_print_goes_to_the_log(tmp_path, capfd):
    log = tmp_path / "rewards.log"
    with RewardPool(OBEY, num_workers=1, timeout_s=5.0, log_path=log) as pool:
        pool.score(jobs("print", "print"))
    assert log.read_text() == "a line from the reward\n" * 2
    assert capfd.readouterr() == ("", "")


SCRIPT = """
import os, sys, threading, time
from paceline.rewards.pool import RewardPool
from paceline.types import RewardJob, RewardSpec

pool = RewardPool(RewardSpec("rewards_to_score:obey"), num_workers=2, timeout_s=60.0)
pool.score([RewardJob("", "1")] * 8)
for completion in sys.argv[1:]:
    pool.submit(RewardJob("", completion))
try:
    print(*pool.worker_pids, flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    pool.close()
    sys.exit(9)
"""


def start_script(*completions: str) -> tuple["subprocess.Popen[str]", list[int]]:
    """A process with a pool, not guarded by a main check, and its workers' process ids."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *completions],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.parametrize("completion", ["1", "hang"])
def test_workers_end_when_their_parent_is_killed(completion):
    process, pids = start_script(completion)
    assert len(pids) == 2
    process.kill()
    process.communicate()
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_workers_that_hold_the_interpreter_end_after_their_parent_by_their_cpu_limit():
    with RewardPool(OBEY, num_workers=1, timeout_s=0.2) as pool:
        pool.score(jobs("1"))
        (pid,) = pool.worker_pids
        handle = pool.submit(jobs("hang_holding_the_lock")[0])
        pool._dispatcher._end_overdue = lambda: (
            None
        )  # the pool no longer watches, as if its process were gone
        assert wait_until(lambda: not is_alive(pid), limit_s=15.0)
        assert "SIGVTALRM" in pool.gather([handle])[0].message


def test_an_interrupt_from_the_terminal_prints_no_worker_traceback():
    process, pids = start_script("hang")
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 9
    assert errors == ""
    assert not any(is_alive(pid) for pid in pids)


def verdict(score: float | None, outcome: str = "score", message: str = "") -> Verdict:
    return Verdict(outcome, score, 0.1, message)  # type: ignore[arg-type]


def test_all_zero_scores_beside_errors_raise_the_alarm_and_show_the_first_failure():
    alarm = reward_alarm([verdict(0.0), verdict(None, "error", "KeyError: 'x'"), verdict(None, "timeout")])
    assert alarm is not None
    assert "all 1 scores of 3 samples are zero while 1 scorings failed and 1 timed out" in alarm
    assert "KeyError: 'x'" in alarm


def test_no_alarm_for_honest_zeros_or_for_failures_beside_successes():
    assert reward_alarm([verdict(0.0), verdict(0.0)]) is None
    assert reward_alarm([verdict(1.0), verdict(None, "error")]) is None
    assert reward_alarm([]) is None
