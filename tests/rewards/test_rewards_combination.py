"""Several sources: weights, missing verdicts, optional sources, and the pool among them."""

import pytest

from paceline.rewards.combination import SourcedRewards, Weighting, combine
from paceline.rewards.pool import RewardPool, RewardPoolError
from paceline.types import RewardJob, RewardSpec, Verdict

WEIGHTS = {"rule": Weighting(1.0), "taste": Weighting(0.5, optional=True)}


def parts(rule: float | None, taste: float | None, outcome: str = "error") -> dict[str, Verdict]:
    return {
        name: Verdict(
            "score" if score is not None else outcome, score, 0.25, "" if score is not None else "down"
        )  # type: ignore[arg-type]
        for name, score in (("rule", rule), ("taste", taste))
    }


def test_the_reward_is_the_weighted_sum_and_keeps_its_parts() -> None:
    (verdict,), left_out = combine([parts(1.0, -3.0)], WEIGHTS)
    assert verdict.score == 1.0 + 0.5 * -3.0 and verdict.seconds == 0.5 and not left_out
    assert verdict.parts is not None and verdict.parts["taste"].score == -3.0


@pytest.mark.parametrize("outcome", ["error", "timeout"])
def test_a_sample_that_a_required_source_did_not_score_has_no_verdict(outcome: str) -> None:
    verdicts, _ = combine([parts(None, 2.0, outcome), parts(0.0, 2.0)], WEIGHTS)
    assert [(verdict.outcome, verdict.score) for verdict in verdicts] == [(outcome, None), ("score", 1.0)]
    assert verdicts[0].message == "rule: down"


def test_an_error_outranks_a_timeout() -> None:
    required = {"slow": Weighting(), "broken": Weighting()}
    one = {"slow": Verdict("timeout", None, 1.0, "late"), "broken": Verdict("error", None, 0.0, "raised")}
    (verdict,), _ = combine([one], required)
    assert (verdict.outcome, verdict.message) == ("error", "broken: raised")


def test_an_optional_source_that_fails_for_one_is_left_out_for_all_of_the_prompt() -> None:
    # with its half points counted for the others only, the second sample would fall behind for no reason of its own
    verdicts, left_out = combine([parts(0.0, 2.0), parts(0.0, None), parts(1.0, 2.0)], WEIGHTS)
    assert [verdict.score for verdict in verdicts] == [0.0, 0.0, 1.0]
    assert left_out == {"taste": 2} and "taste: down" in verdicts[1].message


def test_a_sample_without_a_verdict_does_not_decide_what_is_left_out() -> None:
    verdicts, left_out = combine([parts(None, None), parts(1.0, 2.0)], WEIGHTS)
    assert [verdict.score for verdict in verdicts] == [None, 2.0] and not left_out


def test_pools_are_sources() -> None:
    weightings = {"exact": Weighting(2.0), "again": Weighting(1.0)}
    pools = {name: RewardPool(RewardSpec("exact_match"), 1, 20.0) for name in weightings}
    chat = ({"role": "user", "content": "q"},)
    jobs = [RewardJob("q", "yes", "yes", {}, chat), RewardJob("q", "no", "yes")]
    with SourcedRewards(weightings, pools) as rewards:
        verdicts = rewards.score(jobs)
        assert [verdict.score for verdict in verdicts] == [3.0, 0.0]
        assert rewards.take_counts() == {
            "reward/exact/workers_replaced": 0,
            "reward/again/workers_replaced": 0,
        }
    with pytest.raises(RewardPoolError):
        pools["exact"].submit(RewardJob("q", "yes", "yes"))


def test_a_source_that_was_never_opened_is_not_left_out_silently() -> None:
    with SourcedRewards(WEIGHTS, {}) as rewards, pytest.raises(RuntimeError, match="taste"):
        rewards.submit(RewardJob("q", "c"))
