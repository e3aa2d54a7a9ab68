from paceline.data.baseline import constant_baseline
from paceline.rewards.pool import RewardPool
from paceline.types import Prompt, RewardSpec


def prompts(*answers: str | None) -> list[Prompt]:
    return [Prompt(str(index), (1,), "question", answer) for index, answer in enumerate(answers)]


def test_the_best_constant_answer_is_the_most_frequent_reference():
    with RewardPool(RewardSpec("exact_match"), num_workers=1, timeout_s=5.0) as pool:
        best = constant_baseline(prompts("no", "yes", "yes", "maybe"), pool)
        assert best is not None
        assert (best.answer, best.accuracy, best.num_candidates, best.num_without_verdict) == (
            "yes",
            0.5,
            3,
            0,
        )

        bounded = constant_baseline(prompts("no", "yes", "yes", "maybe"), pool, max_candidates=1)
        assert bounded is not None
        assert (bounded.answer, bounded.num_candidates, bounded.num_candidates_left_out) == ("yes", 1, 2)

        unscored = constant_baseline(prompts("yes", None), pool, extra_candidates=["no"])
        assert unscored is not None
        assert (unscored.answer, unscored.accuracy, unscored.num_without_verdict) == ("yes", 1.0, 1)

        assert constant_baseline(prompts(None), pool) is None
        assert constant_baseline([], pool, extra_candidates=["x"]) is None


def test_an_extra_candidate_that_a_lenient_scorer_accepts_wins():
    with RewardPool(RewardSpec("rewards_for_data:accepts_zero"), num_workers=1, timeout_s=5.0) as pool:
        best = constant_baseline(prompts("heads", "tails"), pool, extra_candidates=["0"])
    assert best is not None
    assert (best.answer, best.accuracy) == ("0", 1.0)
