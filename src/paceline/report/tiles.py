"""The headline figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.report import wording


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline figure with a line below it."""

    label: str
    value: str
    note: str
    wide: bool = False


def tiles(figures: Mapping[str, Any]) -> list[Tile]:
    """Accuracy (or held-out loss), step time, throughput, share of the update, accounted share, MFU."""
    return [
        _held_out_loss(figures) if figures["algorithm"] == "sft" else _accuracy(figures),
        Tile("Step time", wording.seconds(figures["step_time_s"]), _median(figures)),
        Tile("Tokens per second", wording.quantity(figures["tokens_per_s"]), _generated(figures)),
        Tile("Actor update", wording.share(figures["update_actor_share"]), "of step time"),
        Tile("Accounted for", wording.share(figures["accounted_fraction"], 2), _accounted(figures)),
        _mfu(figures),
    ]


def _accuracy(figures: Mapping[str, Any]) -> Tile:
    before, after = figures["accuracy_before"], figures["accuracy_after"]
    if before is None and after is None:
        return Tile("Held-out accuracy", wording.UNKNOWN, "not measured", wide=True)
    value = f"{wording.share(before)} → {wording.share(after)}"
    parts = []
    intervals = figures["accuracy_before_interval"], figures["accuracy_after_interval"]
    if all(intervals):
        parts.append(f"95 % intervals {wording.points(*intervals[0])} → {wording.points(*intervals[1])}")
    if figures["num_eval_prompts"]:
        parts.append(f"{figures['num_eval_prompts']:,} prompts")
    if figures["accuracy_constant"] is not None:
        parts.append(f"best constant answer {wording.share(figures['accuracy_constant'])}")
    return Tile("Held-out accuracy, before → after", value, " · ".join(parts), wide=True)


def _held_out_loss(figures: Mapping[str, Any]) -> Tile:
    before, after = figures["eval_loss_before"], figures["eval_loss_after"]
    if before is None and after is None:
        return Tile("Held-out loss", wording.UNKNOWN, "not measured", wide=True)
    value = f"{wording.number(before)} → {wording.number(after)}"
    perplexities = wording.number(figures["perplexity_before"]), wording.number(figures["perplexity_after"])
    note = f"nats per learned token · perplexity {perplexities[0]} → {perplexities[1]}"
    if figures["num_eval_rows"]:
        note += f" · {figures['num_eval_rows']:,} rows"
    return Tile("Held-out loss, before → after", value, note, wide=True)


def _median(figures: Mapping[str, Any]) -> str:
    if figures["step_time_s"] is None:
        return "no step finished"
    return f"mean; median {wording.seconds(figures['step_time_median_s'])}"


def _generated(figures: Mapping[str, Any]) -> str:
    rate = figures["generated_tokens_per_s"]
    return f"{wording.quantity(rate)} while generating" if rate is not None else "prompt and response"


def _accounted(figures: Mapping[str, Any]) -> str:
    unaccounted = figures["unaccounted_s"]
    if unaccounted is None:
        return "no step finished"
    return f"{wording.seconds(unaccounted)} a step in no span"


def _mfu(figures: Mapping[str, Any]) -> Tile:
    achieved = figures["tflops_update_actor"]
    rate = f"{wording.number(achieved)} TFLOP/s in the actor update" if achieved else "no FLOPs recorded"
    if figures["peak_tflops"] is None and figures["mfu"] is not None:
        return Tile("MFU", wording.share(figures["mfu"]), "actor update, as the other framework logged it")
    if figures["peak_tflops"] is None:
        return Tile("MFU", "unknown", f"hardware without a known peak; {rate}")
    if figures["mfu"] is None:
        return Tile("MFU", wording.UNKNOWN, rate)
    return Tile(
        "MFU", wording.share(figures["mfu"]), f"actor update; whole step {wording.share(figures['mfu_step'])}"
    )
