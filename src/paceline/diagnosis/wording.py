"""Sentences of a diagnosis, in English and Chinese. What they say is in `texts/` and `features.yaml`; numbers are the
records' own, rounded to three digits."""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from paceline.config import ConfigError
from paceline.diagnosis.features import FEATURES
from paceline.diagnosis.results import UNKNOWN_VALUE, Evidence, Finding, Switch, Wait

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

_FOLDER = Path(__file__).parent / "texts"
_ONE_OF_MANY = re.compile(r"(?<![\d.,])1 (step|rank|sample|update|pair|process)(es|s)\b")
_SHARES = frozenset({"share", "padding_share"})
_SECONDS = frozenset({"seconds", "per_sample", "overhead", "each", "change", "slope"})


@lru_cache(maxsize=len(LANGUAGES))
def texts(lang: Language) -> Mapping[str, Mapping[str, str]]:
    """Every text of a language by section and id."""
    content: dict[str, dict[str, str]] = yaml.safe_load(
        (_FOLDER / f"{lang}.yaml").read_text(encoding="utf-8")
    )
    return content


def checked_language(lang: str) -> Language:
    """`lang`, if there are texts in it. Raises `ConfigError` if not."""
    for known in LANGUAGES:
        if lang == known:
            return known
    known_ones = ", ".join(LANGUAGES)
    raise ConfigError("--lang", lang, f"must be one of {known_ones}", "en", zh=f"须是 {known_ones} 之一")


def stage_name(stage: str, lang: Language) -> str:
    """A stage as people call it."""
    return texts(lang)["stages"][stage]


def cause_name(cause: str, lang: Language) -> str:
    """A cause as people call it."""
    return texts(lang)["causes"][cause]


def wait_name(kind: str, lang: Language) -> str:
    """What a wait is for."""
    return texts(lang)["waits"][kind]


def note(text: str, lang: Language) -> str:
    """A note: the sentence of a known id; anything else (an importer's own words) as it is."""
    return texts(lang)["notes"].get(text, text)


def sentence(item: Finding | Switch | Evidence | Wait, lang: Language) -> str:
    """One sentence (evidence and waits: one line) about a finding, a switch, a number or a wait."""
    match item:
        case Finding():
            values: dict[str, Any] = {"seconds": item.seconds, **item.values}
            return _text_of(item, lang).format_map(
                {name: _shown(name, value, lang) for name, value in values.items()}
            )
        case Switch():
            return _switch_sentence(item, lang)
        case Evidence():
            return f"{texts(lang)['evidence'][item.name]}: {_with_unit(item.value, item.unit)}"
        case Wait():
            return f"{wait_name(item.kind, lang)}: {seconds(item.seconds)} ({percent(item.share)})"


def _text_of(item: Finding, lang: Language) -> str:
    """A finding's sentence; a shorter one where its records do not hold all that the first would say."""
    is_partly_known = UNKNOWN_VALUE in item.values.values()
    return texts(lang)["findings_partly_known" if is_partly_known else "findings"][item.id]


def risk(switch: Switch, lang: Language) -> str:
    """What could go wrong with a switch."""
    return FEATURES[switch.feature].risk[lang]


def prerequisite(switch: Switch, lang: Language) -> str:
    """What a switch needs."""
    return FEATURES[switch.feature].prerequisite[lang]


def _switch_sentence(switch: Switch, lang: Language) -> str:
    feature = FEATURES[switch.feature]
    saved = seconds(switch.saved_s)
    interval = f"{seconds(switch.low)} – {seconds(switch.high)}"
    if lang == "zh":
        return f"{feature.title[lang]}：预计每步节省 {saved}（{interval}）。{feature.effect[lang]}"
    return f"{feature.title[lang]}: predicted to save {saved} per step ({interval}). {feature.effect[lang]}"


def _shown(name: str, value: float | str, lang: Language) -> str:
    if isinstance(value, str):
        return texts(lang)["stages"].get(value, value) if name == "where" else value
    if name in _SHARES:
        return percent(value)
    if name in _SECONDS:
        return seconds(value)
    if name == "bandwidth":
        return f"{number(value / 1e6)} MB/s"
    return number(value)


def singular(text: str) -> str:
    """An English text in which nothing is one of several: "1 steps" as "1 step". A Chinese one as it is."""
    return _ONE_OF_MANY.sub(r"1 \1", text)


def number(value: float) -> str:
    """Three significant digits, thousands grouped; whole numbers from 100 on."""
    if value and abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.0f}"


def seconds(value: float) -> str:
    """A duration in s or ms."""
    return f"{number(value)} s" if abs(value) >= 1.0 else f"{number(value * 1e3)} ms"


def percent(value: float) -> str:
    """A share in percent."""
    return f"{number(value * 100)} %"


def _with_unit(value: float, unit: str) -> str:
    if unit == "share":
        return percent(value)
    return seconds(value) if unit == "s" else f"{number(value)} {unit}".rstrip()
