"""The paragraphs about two runs: what the one gained over the other, and which wait it lost."""

from paceline.diagnosis.wording import Language
from paceline.explanation.comparison import Change, Comparison
from paceline.explanation.numbers import Figure, Phrases
from paceline.explanation.paragraphs import named_stage, shown

_MAX_STAGES = 4
_MAX_SETTINGS = 5


def gain_paragraphs(
    phrases: Phrases, comparison: Comparison, other: str, lang: Language, audience: str
) -> dict[str, str]:
    """What changed, which settings differ (for an engineer), and which waits went."""
    space = phrases.templates["space"]
    said = [_step(phrases, comparison, other), _stages(phrases, comparison, lang, audience)]
    settings = [_settings(phrases, comparison)] if audience == "engineer" else []
    waits = [*settings, _waits(phrases, comparison, lang)]
    if others := comparison.unexplained_stages:
        names = [named_stage(phrases, name, lang, audience) for name in others[:_MAX_STAGES]]
        waits.append(phrases.say("against.machine", items=phrases.listed(names)))
    waits.append(phrases.say(f"against.caution.{audience}"))
    return {"gain": space.join(said), "removed": space.join(waits)}


def _step(phrases: Phrases, comparison: Comparison, other: str) -> str:
    change = comparison.step.seconds
    outcome = "same"
    if comparison.step.is_clear:
        outcome = "faster" if change.value < 0 else "slower"
    low, high = _bounds(comparison.step) if outcome != "same" else (change.low, change.high)
    return phrases.say(
        f"against.step.{outcome}",
        other=f"`{other}`",
        count=Figure("num_pairs", comparison.num_pairs, "count"),
        step=Figure("paired_step_s", comparison.step_s, "s"),
        before=Figure("other_step_s", comparison.other_step_s, "s"),
        saved=Figure("change/step", abs(change.value), "s"),
        low=Figure("change_low/step", low, "s"),
        high=Figure("change_high/step", high, "s"),
    )


def _bounds(change: Change) -> tuple[float, float]:
    """Interval of the absolute change, lower bound first."""
    low, high = sorted((abs(change.seconds.low), abs(change.seconds.high)))
    return low, high


def _stages(phrases: Phrases, comparison: Comparison, lang: Language, audience: str) -> str:
    clear = [change for change in comparison.stages if change.is_clear and change.name != "idle"]
    if not clear:
        return phrases.say("against.stages.none")
    items = [
        _change(phrases, change, named_stage(phrases, change.name, lang, audience), "change")
        for change in clear[:_MAX_STAGES]
    ]
    return phrases.say("against.stages", items=phrases.listed(items))


def _change(phrases: Phrases, change: Change, name: str, key: str) -> str:
    seconds = Figure(f"{key}/{change.name}", abs(change.seconds.value), "s")
    return phrases.say(
        "against.less" if change.seconds.value < 0 else "against.more", name=name, seconds=seconds
    )


def _settings(phrases: Phrases, comparison: Comparison) -> str:
    differences = comparison.differences
    if not differences:
        return phrases.say("against.settings.none")
    items = [
        phrases.say("against.setting", key=one.key, value=shown(one.value), other=shown(one.other))
        for one in differences[:_MAX_SETTINGS]
    ]
    rest = len(differences) - _MAX_SETTINGS
    if rest > 0:
        items.append(phrases.say("against.settings.more", count=Figure("more_settings", rest, "count")))
    return phrases.say("against.settings", items=phrases.listed(items))


def _waits(phrases: Phrases, comparison: Comparison, lang: Language) -> str:
    clear = [change for change in comparison.waits if change.is_clear]
    if not clear:
        return phrases.say("against.wait.none")
    items = phrases.listed(
        [_change(phrases, change, phrases.say(f"wait.{change.name}"), "wait_change") for change in clear]
    )
    only = comparison.only_feature
    if only is not None:
        return phrases.say("against.wait.one", feature=only.title[lang], items=items)
    several = len(comparison.differences) > 1
    return phrases.say("against.wait.several" if several else "against.wait.setting", items=items)
