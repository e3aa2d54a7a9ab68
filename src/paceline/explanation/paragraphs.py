"""The paragraphs about one run: step, stages, balance between ranks, waits, and what to do next."""

import json
from collections.abc import Mapping

from paceline.diagnosis import Diagnosis
from paceline.diagnosis.features import FEATURES
from paceline.diagnosis.run_records import RunRecords
from paceline.diagnosis.wording import Language, cause_name, stage_name
from paceline.explanation.figures import CHECKPOINT, Balance, RunFigures
from paceline.explanation.numbers import Figure, Phrases

_UPDATE = "update_actor"
_LEAST_SHARE = 0.01
_LEAST_UNACCOUNTED = 0.001
_EVEN, _UNEVEN = 1.05, 1.2


def step_paragraph(phrases: Phrases, run: RunRecords, figures: RunFigures, audience: str) -> str:
    """How long a step takes, and what that is a mean of."""
    step = Figure("step_s", figures.step_s, "s")
    count = Figure("num_steps", len(run.steps), "count")
    if len(run.ranks) == 1:
        origin = "imported" if run.is_imported else "one_rank"
        said = [phrases.say(f"step.{audience}.{origin}", step=step, count=count)]
    else:
        ranks = Figure("num_ranks", len(run.ranks), "count")
        said = [phrases.say(f"step.{audience}", step=step, count=count, ranks=ranks)]
    warmup = Figure("num_warmup", len(run.warmup), "count")
    if audience == "engineer" and run.num_slowed:
        profiled = Figure("num_profiled", run.num_slowed, "count")
        said.append(phrases.say("step.left_out.profiled", warmup=warmup, profiled=profiled))
    elif audience == "engineer" and run.warmup:
        said.append(phrases.say("step.left_out", warmup=warmup))
    return _joined(phrases, said)


def stage_paragraph(phrases: Phrases, figures: RunFigures, lang: Language, audience: str) -> str:
    """The share of update_actor, of every other stage, and of no stage."""
    if not figures.stage_s:
        return phrases.say("unaccounted.all")
    said = [_update(phrases, figures, audience)]
    others = {name: seconds for name, seconds in figures.stage_s.items() if name != _UPDATE}
    items, small_s = [], 0.0
    for name, seconds in others.items():
        if seconds < _LEAST_SHARE * figures.step_s:
            small_s += seconds
            continue
        items.append(
            phrases.say(
                "stage",
                name=named_stage(phrases, name, lang, audience),
                share=_share(f"stage_share/{name}", seconds, figures),
                seconds=Figure(f"stage_s/{name}", seconds, "s"),
            )
        )
    if small_s > 0:
        items.append(phrases.say("stages.small", share=_share("small_share", small_s, figures)))
    if items:
        said.append(phrases.say("stages", items=phrases.listed(items)))
    if figures.unaccounted_s > _LEAST_UNACCOUNTED * figures.step_s:
        said.append(_unaccounted(phrases, figures, audience))
    return _joined(phrases, said)


def balance_paragraph(phrases: Phrases, run: RunRecords, figures: RunFigures, audience: str) -> str:
    """Whether ranks have the same number of tokens, and are busy for the same time."""
    balance = figures.balance
    if balance is None:
        return phrases.say("balance.imported" if run.is_imported else "balance.one_rank")
    return _joined(
        phrases,
        [_token_balance(phrases, balance, audience), _busy_balance(phrases, balance, figures, audience)],
    )


def cause_paragraph(phrases: Phrases, run: RunRecords, figures: RunFigures, audience: str) -> str:
    """Actual compute, the waits, checkpoints, retries."""
    said = [_causes(phrases, figures, audience)]
    if audience == "engineer" and figures.uncovered_s > _LEAST_SHARE * figures.step_s:
        said.append(phrases.say("causes.uncovered", seconds=Figure("uncovered_s", figures.uncovered_s, "s")))
    blocked_s = figures.stage_s.get(CHECKPOINT, 0.0)
    if blocked_s > 0:
        seconds = Figure(f"stage_s/{CHECKPOINT}", blocked_s, "s")
        share = _share(f"stage_share/{CHECKPOINT}", blocked_s, figures)
        said.append(phrases.say("checkpoint", seconds=seconds, share=share))
    else:
        said.append(phrases.say("checkpoint.unknown" if run.is_imported else "checkpoint.none"))
    if figures.retries is None:
        said.append(phrases.say("retries.unknown"))
    elif figures.retries:
        said.append(phrases.say("retries", count=Figure("retries", figures.retries, "count")))
    else:
        said.append(phrases.say("retries.none"))
    return _joined(phrases, said)


def next_paragraph(phrases: Phrases, found: Diagnosis, lang: Language, audience: str) -> str:
    """The bottleneck and the first switch that leaves alone what is learned. No prediction: those are no records."""
    said = []
    if found.stages:
        first = found.stages[0]
        stage, kind = named_stage(phrases, first.stage, lang, audience), cause_name(first.kind, lang)
        known = "usual" if first.source == "nature" else "measured"
        said.append(phrases.say(f"bottleneck.{known}", stage=stage, kind=kind))
    switch = next((one for one in found.switches if not one.changes_training), None)
    if switch is not None:
        feature = FEATURES[switch.feature].title[lang]
        if audience == "manager":
            said.append(phrases.say("next.manager", feature=feature))
        else:
            keys = phrases.listed([f"`{setting(key, value)}`" for key, value in switch.keys.items()])
            said.append(phrases.say("next", feature=feature, keys=keys))
    if audience == "engineer":
        said.append(phrases.say("next.more"))
    return _joined(phrases, said)


def named_stage(phrases: Phrases, stage: str, lang: Language, audience: str) -> str:
    """A stage by its name, or, for a manager, by what is done in it."""
    return phrases.say(f"plain.{stage}") if audience == "manager" else stage_name(stage, lang)


def setting(key: str, value: object) -> str:
    """A setting as it is written on a command line."""
    return f"{key}={shown(value)}"


def shown(value: object) -> str:
    """A setting's value as it is written on a command line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _update(phrases: Phrases, figures: RunFigures, audience: str) -> str:
    seconds = figures.stage_s.get(_UPDATE)
    if seconds is None:
        return phrases.say("update.none")
    values = {
        "share": _share(f"stage_share/{_UPDATE}", seconds, figures),
        "seconds": Figure(f"stage_s/{_UPDATE}", seconds, "s"),
    }
    if audience == "engineer" and figures.update_compute_s is not None:
        compute = Figure("update_compute_s", figures.update_compute_s, "s")
        return phrases.say("update.engineer.compute", compute=compute, **values)
    return phrases.say(f"update.{audience}", **values)


def _unaccounted(phrases: Phrases, figures: RunFigures, audience: str) -> str:
    share = _share("unaccounted_share", figures.unaccounted_s, figures)
    if audience == "manager":
        return phrases.say("unaccounted.manager", share=share)
    seconds = Figure("unaccounted_s", figures.unaccounted_s, "s")
    return phrases.say("unaccounted.engineer", share=share, seconds=seconds)


def _token_balance(phrases: Phrases, balance: Balance, audience: str) -> str:
    rank, ratio = _largest(balance.tokens)
    if ratio is None:
        return phrases.say("balance.tokens.unknown")
    values = {"ratio": Figure("tokens_max_over_mean", ratio, "ratio")}
    if audience == "engineer":
        values["rank"] = Figure("tokens_max_rank", rank, "id")
    return phrases.say(f"balance.tokens.{audience}", verdict=_verdict(phrases, ratio), **values)


def _busy_balance(phrases: Phrases, balance: Balance, figures: RunFigures, audience: str) -> str:
    rank, ratio = _largest(balance.busy_s)
    if ratio is None:
        return ""
    idle_s = figures.stage_s.get("idle", 0.0)
    values = {
        "ratio": Figure("busy_max_over_mean", ratio, "ratio"),
        "idle": Figure("stage_s/idle", idle_s, "s"),
        "share": _share("stage_share/idle", idle_s, figures),
    }
    if audience == "engineer":
        values["rank"] = Figure("busy_max_rank", rank, "id")
    return phrases.say(f"balance.busy.{audience}", verdict=_verdict(phrases, ratio), **values)


def _verdict(phrases: Phrases, ratio: float) -> str:
    if ratio <= _EVEN:
        return phrases.say("balance.even")
    return phrases.say("balance.uneven" if ratio <= _UNEVEN else "balance.unequal")


def _largest(by_rank: Mapping[int, float]) -> tuple[int, float | None]:
    """The rank with most, and how much that is of the mean; None where all have nothing."""
    rank = max(by_rank, key=lambda one: by_rank[one])
    mean = sum(by_rank.values()) / len(by_rank)
    return rank, by_rank[rank] / mean if mean > 0 else None


def _causes(phrases: Phrases, figures: RunFigures, audience: str) -> str:
    if figures.cause_source == "none":
        return phrases.say("causes.none")
    causes = {name: Figure(f"cause_s/{name}", value, "s") for name, value in figures.cause_s.items()}
    waits = {name: causes[name] for name in ("communication", "data", "queue")}
    if figures.cause_source == "spans":
        return phrases.say("causes.spans" if audience == "engineer" else "causes.spans.manager", **waits)
    if audience == "engineer":
        return phrases.say("causes.profile", **causes)
    waits["scheduling"] = causes["scheduling"]
    work = figures.cause_s["compute"] + figures.cause_s["memory"]
    return phrases.say("causes.profile.manager", work=Figure("work_s", work, "s"), **waits)


def _share(key: str, seconds: float, figures: RunFigures) -> Figure:
    return Figure(key, seconds / figures.step_s if figures.step_s else 0.0, "share")


def _joined(phrases: Phrases, said: list[str]) -> str:
    return phrases.templates["space"].join(part for part in said if part)
