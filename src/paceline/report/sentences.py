"""A run in plain sentences: what a manager reads first. Every number is one of `report_figures`."""

from collections.abc import Mapping
from typing import Any

from paceline.report import wording
from paceline.report.palette import MEANINGS, TRAINING_STAGES, UNACCOUNTED


def summary_sentences(figures: Mapping[str, Any]) -> list[str]:
    """One to four sentences: what came out, what a step costs, where it goes, how far to trust it."""
    sentences = (_outcome(figures), _learning(figures), _cost(figures), _trust(figures))
    return [sentence for sentence in sentences if sentence]


def _outcome(figures: Mapping[str, Any]) -> str:
    num_steps = figures["num_steps"]
    done = f"{num_steps:,} step{'' if num_steps == 1 else 's'}"
    match figures["status"]:
        case "failed":
            reason = f": {figures['message']}" if figures["message"] else ""
            return f"The run failed after {done}{reason}."
        case "stopped":
            return f"The run was asked to stop and ended after {done}."
        case "completed":
            return ""
        case "imported":
            return (
                f"Read from another framework's records, which hold {done}; how the run ended is not known."
            )
        case _:
            return f"The run is still going or was interrupted; this is the state after {done}."


def _learning(figures: Mapping[str, Any]) -> str:
    return _loss(figures) if figures["algorithm"] == "sft" else _accuracy(figures)


def _loss(figures: Mapping[str, Any]) -> str:
    before, after = figures["eval_loss_before"], figures["eval_loss_after"]
    if before is None or after is None:
        return "Held-out loss was not measured both before and after training."
    verb = "fell" if after < before else "rose" if after > before else "stayed"
    rows = figures["num_eval_rows"]
    text = f"Held-out loss {verb} from {wording.number(before)} to {wording.number(after)} nats per learned token"
    text += f" (perplexity {wording.number(figures['perplexity_before'])} to "
    text += f"{wording.number(figures['perplexity_after'])})"
    return f"{text}, measured on {rows:,} rows that were not trained on." if rows else f"{text}."


def _accuracy(figures: Mapping[str, Any]) -> str:
    before, after = figures["accuracy_before"], figures["accuracy_after"]
    if before is None and after is None:
        return "Held-out accuracy was not measured."
    if before is None or after is None:
        known, when = (before, "before") if after is None else (after, "after")
        return (
            f"Held-out accuracy {when} training is {wording.share(known)}; the other measurement is missing."
        )
    verb = "rose" if after > before else "fell" if after < before else "stayed the same"
    text = f"Held-out accuracy {verb} from {wording.share(before)} to {wording.share(after)}"
    if after == before:
        text = f"Held-out accuracy {verb} at {wording.share(after)}"
    prompts = figures["num_eval_prompts"]
    text += f", measured on {prompts:,} prompts" if prompts else ""
    return f"{text}; {_certainty(figures)}."


def _certainty(figures: Mapping[str, Any]) -> str:
    interval, constant = figures["accuracy_change_interval"], figures["accuracy_constant"]
    if interval is None:
        return "how sure that is, is not known"
    low, high = interval
    if low > 0 or high < 0:
        text = "the change is larger than chance explains (95 %)"
    else:
        text = "a change of this size can be chance (95 %)"
    if constant is not None:
        text += f", and always giving the best constant answer would score {wording.share(constant)}"
    return text


def _cost(figures: Mapping[str, Any]) -> str:
    step_time, stages = figures["step_time_s"], figures["stages"]
    if not step_time or not stages:
        return "No step was finished, so there is no step time."
    slices = {**stages, UNACCOUNTED: figures["unaccounted_s"] or 0.0}
    biggest = max(slices, key=lambda name: slices[name])
    meaning = MEANINGS.get(biggest, biggest)
    text = (
        f"A step takes {wording.seconds(step_time)} on average; the largest part is {biggest} ({meaning}) "
        f"with {wording.share(slices[biggest] / step_time, 0)}"
    )
    trained = 1.0 - figures["non_training_share"]
    if biggest in TRAINING_STAGES:
        return f"{text}, and {wording.share(figures['non_training_share'], 0)} of the time is not training."
    return f"{text}, while training itself is {wording.share(trained, 0)}: the other {_rest(trained)} is not training."


def _rest(trained: float) -> str:
    return wording.share(1.0 - trained, 0)


def _trust(figures: Mapping[str, Any]) -> str:
    accounted = figures["accounted_fraction"]
    if accounted is None:
        return ""
    run = figures["accounted_fraction_run"]
    text = f"The ledger accounts for {wording.share(accounted, 2)} of the steps' wall time"
    return f"{text} and {wording.share(run, 2)} of the whole run." if run is not None else f"{text}."
