"""A run in plain sentences: what a manager reads first. Every number is one of `report_figures`."""

from collections.abc import Mapping
from typing import Any

from paceline.report import formats
from paceline.report.palette import TRAINING_STAGES, UNACCOUNTED
from paceline.report.words import Words


def summary_sentences(figures: Mapping[str, Any], words: Words) -> list[str]:
    """One to four sentences: what came out, what a step costs, where it goes, how far to trust it."""
    sentences = (
        _outcome(figures, words),
        _learning(figures, words),
        _cost(figures, words),
        _trust(figures, words),
    )
    return [sentence for sentence in sentences if sentence]


def _outcome(figures: Mapping[str, Any], words: Words) -> str:
    done = words.number_of("step", figures["num_steps"])
    match figures["status"]:
        case "failed":
            message = figures["message"]
            reason = words("summary.reason", message=message) if message else ""
            return words("summary.failed", done=done, reason=reason)
        case "refused":
            return words("summary.refused", message=figures["message"])
        case "died":
            return words("summary.died", done=done)
        case "stopped":
            return words("summary.stopped", done=done)
        case "completed":
            return ""
        case "imported":
            return words("summary.imported", done=done)
        case _:
            return words("summary.going", done=done)


def _learning(figures: Mapping[str, Any], words: Words) -> str:
    return _loss(figures, words) if figures["algorithm"] == "sft" else _accuracy(figures, words)


def _loss(figures: Mapping[str, Any], words: Words) -> str:
    before, after = figures["eval_loss_before"], figures["eval_loss_after"]
    if before is None or after is None:
        return words("summary.loss-unknown")
    rows = figures["num_eval_rows"]
    return words(
        f"summary.loss-{_direction(before, after)}",
        before=formats.number(before),
        after=formats.number(after),
        pbefore=formats.number(figures["perplexity_before"]),
        pafter=formats.number(figures["perplexity_after"]),
        where=words("summary.loss-rows", rows=words.number_of("row", rows)) if rows else "",
    )


def _direction(before: float, after: float) -> str:
    return "rose" if after > before else "fell" if after < before else "stayed"


def _accuracy(figures: Mapping[str, Any], words: Words) -> str:
    before, after = figures["accuracy_before"], figures["accuracy_after"]
    if before is None and after is None:
        return words("summary.accuracy-unknown")
    if after is None:
        return words("summary.accuracy-before", share=formats.share(before))
    if before is None:
        return words("summary.accuracy-after", share=formats.share(after))
    prompts = figures["num_eval_prompts"]
    return words(
        f"summary.accuracy-{_direction(before, after)}",
        before=formats.share(before),
        after=formats.share(after),
        where=words("summary.on-prompts", prompts=words.number_of("prompt", prompts)) if prompts else "",
        certainty=_certainty(figures, words),
    )


def _certainty(figures: Mapping[str, Any], words: Words) -> str:
    interval, constant = figures["accuracy_change_interval"], figures["accuracy_constant"]
    if interval is None:
        return words("summary.certainty-unknown")
    low, high = interval
    text = words("summary.beyond-chance" if low > 0 or high < 0 else "summary.within-chance")
    if constant is not None:
        text += words("summary.constant", share=formats.share(constant))
    return text


def _cost(figures: Mapping[str, Any], words: Words) -> str:
    step_time, stages = figures["step_time_s"], figures["stages"]
    if not step_time or not stages:
        return words("summary.no-step")
    slices = {**stages, UNACCOUNTED: figures["unaccounted_s"] or 0.0}
    biggest = max(slices, key=lambda name: slices[name])
    return words(
        "summary.cost-training" if biggest in TRAINING_STAGES else "summary.cost-other",
        time=formats.seconds(step_time),
        stage=words.stage(biggest),
        meaning=words.meaning(biggest) or biggest,
        share=formats.share(slices[biggest] / step_time, 0),
        trained=formats.share(1.0 - figures["non_training_share"], 0),
        rest=formats.share(figures["non_training_share"], 0),
    )


def _trust(figures: Mapping[str, Any], words: Words) -> str:
    accounted, run = figures["accounted_fraction"], figures["accounted_fraction_run"]
    if accounted is None:
        return ""
    if run is None:
        return words("summary.trust", steps=formats.share(accounted, 2))
    return words("summary.trust-run", steps=formats.share(accounted, 2), run=formats.share(run, 2))
