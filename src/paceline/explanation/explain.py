"""`explain`: a run, and what it gained over another one, in half a page of words."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from paceline.config import ConfigError
from paceline.diagnosis import Diagnosis, diagnose
from paceline.diagnosis.run_records import RunRecords, read_run
from paceline.diagnosis.wording import Language, note
from paceline.explanation.comparison import compare
from paceline.explanation.figures import figures_of
from paceline.explanation.gains import gain_paragraphs
from paceline.explanation.numbers import Figure, Phrases
from paceline.explanation.paragraphs import (
    balance_paragraph,
    cause_paragraph,
    next_paragraph,
    stage_paragraph,
    step_paragraph,
)
from paceline.telemetry.records import read_ledger

Audience = Literal["engineer", "manager"]
AUDIENCES: tuple[Audience, ...] = get_args(Audience)

_FOLDER = Path(__file__).parent / "texts"
_NOTES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Explanation:
    """A title, paragraphs by topic, and every figure they contain in the order of the text."""

    run: str
    against: str | None
    lang: Language
    audience: Audience
    title: str
    paragraphs: Mapping[str, str]
    figures: tuple[Figure, ...]

    @property
    def text(self) -> str:
        """The page."""
        return "\n\n".join((self.title, *self.paragraphs.values()))

    def as_dict(self) -> dict[str, Any]:
        """As `paceline explain --json` prints it."""
        return {
            "v": 1,
            "run": self.run,
            "against": self.against,
            "lang": self.lang,
            "for": self.audience,
            "title": self.title,
            "paragraphs": dict(self.paragraphs),
            "figures": [figure.as_dict() for figure in self.figures],
        }


def explain(
    run_dir: Path,
    against: Path | None = None,
    lang: Language = "en",
    audience: Audience = "engineer",
) -> Explanation:
    """Explains a finished, running or imported run from its records.

    `against` is a run to compare with: times paired by step, settings that differ, waits that went.

    Raises:
        ConfigError: a folder is no run's, or its ledger holds no finished step.
        ValueError: a record is of a version this paceline does not read.
    """
    ledgers = read_ledger(run_dir)  # most of the reading, so done once
    run, found = read_run(run_dir, ledgers), diagnose(run_dir, ledgers)
    figures = figures_of(run)
    phrases = phrases_in(lang)
    title = phrases.say(f"title.{audience}", run=f"`{run.name}`")
    paragraphs = {
        "step": step_paragraph(phrases, run, figures, audience),
        "stages": stage_paragraph(phrases, figures, lang, audience),
        "balance": balance_paragraph(phrases, run, figures, audience),
        "waits": cause_paragraph(phrases, run, figures, audience),
    }
    if against is None:
        paragraphs["gain"] = phrases.say("alone")
    else:
        paragraphs |= _against(phrases, run, read_run(against), lang, audience)
    paragraphs["next"] = next_paragraph(phrases, found, lang, audience)
    if audience == "engineer":
        paragraphs["notes"] = _import_notes(phrases, found, lang)
    return Explanation(
        run=run.name,
        against=None if against is None else str(against),
        lang=lang,
        audience=audience,
        title=title,
        paragraphs={topic: text for topic, text in paragraphs.items() if text},
        figures=tuple(phrases.used),
    )


def checked_audience(audience: str) -> Audience:
    """`audience`, if texts are written for it. Raises `ConfigError` if not."""
    for known in AUDIENCES:
        if audience == known:
            return known
    known_ones = ", ".join(AUDIENCES)
    rule, zh = f"must be one of {known_ones}", f"须是 {known_ones} 之一"
    raise ConfigError("--for", audience, rule, "engineer", zh=zh)


def phrases_in(lang: Language) -> Phrases:
    """The templates of a language, with nothing said yet."""
    templates = templates_in(lang)
    return Phrases(templates, templates["separator"])


@lru_cache(maxsize=2)
def templates_in(lang: Language) -> Mapping[str, str]:
    """Every template of a language."""
    content: dict[str, str] = yaml.safe_load((_FOLDER / f"{lang}.yaml").read_text(encoding="utf-8"))
    return content


def _against(
    phrases: Phrases, run: RunRecords, other: RunRecords, lang: Language, audience: Audience
) -> dict[str, str]:
    comparison = compare(run, other)
    if comparison is None:
        return {"gain": phrases.say("against.too_few", other=f"`{other.name}`")}
    return gain_paragraphs(phrases, comparison, other.name, lang, audience)


def _import_notes(phrases: Phrases, found: Diagnosis, lang: Language) -> str:
    """What an importer said of the log, in its own words and quoted; ids of notes are said where they matter."""
    own = [text for text in found.notes if note(text, lang) == text]
    if not own:
        return ""
    quoted = [json.dumps(text.rstrip("."), ensure_ascii=False) for text in own[:_NOTES_SHOWN]]
    more = "notes.more" if len(own) > _NOTES_SHOWN else "notes"
    return phrases.say(more, items=phrases.templates["lists"].join(quoted))
