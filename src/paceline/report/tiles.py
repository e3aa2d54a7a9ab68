"""The headline figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.report import formats
from paceline.report.words import Words


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline figure with a line below it."""

    label: str
    value: str
    note: str
    wide: bool = False


def tiles(figures: Mapping[str, Any], words: Words) -> list[Tile]:
    """Accuracy (or held-out loss), step time, throughput, share of the update, accounted share, MFU."""
    is_supervised = figures["algorithm"] == "sft"
    return [
        _held_out_loss(figures, words) if is_supervised else _accuracy(figures, words),
        Tile(words("tile.step-time"), formats.seconds(figures["step_time_s"]), _median(figures, words)),
        Tile(
            words("tile.tokens-per-s"), formats.quantity(figures["tokens_per_s"]), _generated(figures, words)
        ),
        Tile(
            words("tile.update-actor"),
            formats.share(figures["update_actor_share"]),
            words("tile.of-step-time"),
        ),
        Tile(
            words("tile.accounted"),
            formats.share(figures["accounted_fraction"], 2),
            _accounted(figures, words),
        ),
        _mfu(figures, words),
    ]


def _accuracy(figures: Mapping[str, Any], words: Words) -> Tile:
    before, after = figures["accuracy_before"], figures["accuracy_after"]
    if before is None and after is None:
        return Tile(words("tile.accuracy"), formats.UNKNOWN, words("tile.not-measured"), wide=True)
    value = f"{formats.share(before)} → {formats.share(after)}"
    parts = []
    first, last = figures["accuracy_before_interval"], figures["accuracy_after_interval"]
    if first and last:
        parts.append(words("tile.intervals", before=formats.points(*first), after=formats.points(*last)))
    if figures["num_eval_prompts"]:
        parts.append(words.number_of("prompt", figures["num_eval_prompts"]))
    if figures["accuracy_constant"] is not None:
        parts.append(words("tile.constant", share=formats.share(figures["accuracy_constant"])))
    return Tile(words("tile.accuracy-change"), value, " · ".join(parts), wide=True)


def _held_out_loss(figures: Mapping[str, Any], words: Words) -> Tile:
    before, after = figures["eval_loss_before"], figures["eval_loss_after"]
    if before is None and after is None:
        return Tile(words("tile.loss"), formats.UNKNOWN, words("tile.not-measured"), wide=True)
    value = f"{formats.number(before)} → {formats.number(after)}"
    note = words(
        "tile.loss-note",
        before=formats.number(figures["perplexity_before"]),
        after=formats.number(figures["perplexity_after"]),
    )
    if figures["num_eval_rows"]:
        note += f" · {words.number_of('row', figures['num_eval_rows'])}"
    return Tile(words("tile.loss-change"), value, note, wide=True)


def _median(figures: Mapping[str, Any], words: Words) -> str:
    if figures["step_time_s"] is None:
        return words("tile.no-step")
    return words("tile.median", median=formats.seconds(figures["step_time_median_s"]))


def _generated(figures: Mapping[str, Any], words: Words) -> str:
    rate = figures["generated_tokens_per_s"]
    if rate is None:
        return words("tile.both-parts")
    return words("tile.generated", rate=formats.quantity(rate))


def _accounted(figures: Mapping[str, Any], words: Words) -> str:
    unaccounted = figures["unaccounted_s"]
    if unaccounted is None:
        return words("tile.no-step")
    return words("tile.in-no-span", time=formats.seconds(unaccounted))


def _mfu(figures: Mapping[str, Any], words: Words) -> Tile:
    label, achieved = words("tile.mfu"), figures["tflops_update_actor"]
    rate = words("tile.tflops", rate=formats.number(achieved)) if achieved else words("tile.no-flops")
    if figures["peak_tflops"] is None and figures["mfu"] is not None:
        return Tile(label, formats.share(figures["mfu"]), words("tile.mfu-foreign"))
    if figures["peak_tflops"] is None:
        return Tile(label, words("tile.unknown"), words("tile.mfu-no-peak", rate=rate))
    if figures["mfu"] is None:
        return Tile(label, formats.UNKNOWN, rate)
    note = words("tile.mfu-note", share=formats.share(figures["mfu_step"]))
    return Tile(label, formats.share(figures["mfu"]), note)
