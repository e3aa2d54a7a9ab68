"""A small ablation record with every kind of entry, for tests that read or draw one."""

from paceline.lab.results import (
    Ablation,
    AblationRow,
    ArmFigures,
    Correctness,
    DifferenceInterval,
    FigureChange,
    Prediction,
    RatioInterval,
    RunEntry,
    StageChange,
)


def arm(name: str, step_s: float, update_s: float) -> ArmFigures:
    return ArmFigures(
        name,
        num_runs=3,
        step_s=step_s,
        stages={"rollout": 1.0, "update_actor": update_s},
        tokens_per_s_per_device=1000.0 / step_s,
        mfu=None,
        peak_memory=0.0,
        host_memory=2.0e9,
        effective_share=0.8,
        reward=0.25,
        loss=1e-4,
    )


def example_ablation() -> Ablation:
    """Two features: one faster and correct, one that failed to run."""
    base, feature = arm("baseline", 4.0, 3.0), arm("shared_prompts", 3.0, 2.0)
    difference = DifferenceInterval(-1.0, -1.2, -0.8, 0.975)
    ratio = RatioInterval(0.75, 0.7, 0.8, 0.975, 0.001, 0.002)
    good = AblationRow(
        name="shared_prompts",
        features=("shared_prompts",),
        keys={"batch.share_prefixes": "on"},
        num_pairs=3,
        num_failed=0,
        step_time=ratio,
        verdict="faster",
        saved_s=DifferenceInterval(1.0, 0.8, 1.2, 0.975),
        stages={"update_actor": StageChange(3.0, 2.0, difference)},
        figures={"tokens_per_s_per_device": FigureChange(250.0, 333.3, difference, ratio)},
        predicted=Prediction(0.9, 0.6, 1.1, 0.775, 0.725, 0.85),
        correctness=Correctness("passed", "within_tolerance", 1e-4, 2e-6, 1e-5, 0.0, True),
        arm=feature,
    )
    bad = AblationRow(
        name="a+b",
        features=("a", "b"),
        keys={},
        num_pairs=0,
        num_failed=3,
        step_time=None,
        verdict="undecided",
        saved_s=None,
        stages={},
        figures={},
        predicted=None,
        correctness=Correctness("not_checked", "no_pairs", None, None, None, None, None),
        arm=None,
        message="refused: train.lr = -1: must be at least 0",
    )
    return Ablation(
        name="demo",
        status="complete",
        recipe="recipes/demo.yaml",
        overrides=("run.num_steps=4",),
        alpha=0.05,
        margin=0.02,
        num_pairs=3,
        num_steps=4,
        num_warmup=1,
        dropped_steps=(1,),
        replayed=True,
        baseline=base,
        rows=(good, bad),
        runs=(RunEntry("baseline", 0, 0, "runs/r0-baseline", "completed", 20.0),),
        environment={"device": "cpu"},
    )
