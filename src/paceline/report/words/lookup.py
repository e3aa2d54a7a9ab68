"""Texts by key: `words("time.title")`. A key that one language lacks cannot be written: both stand in one pair."""

from paceline.diagnosis.wording import LANGUAGES, Language, cause_name, texts
from paceline.report.words import (
    texts_ablation,
    texts_charts,
    texts_compare,
    texts_diagnosis,
    texts_learning,
    texts_memory,
    texts_metrics,
    texts_page,
    texts_records,
    texts_summary,
    texts_time,
)
from paceline.telemetry.metric_schema import spec_of

Lang = Language

TEXTS: dict[str, tuple[str, str]] = {
    **texts_page.TEXTS,
    **texts_summary.TEXTS,
    **texts_time.TEXTS,
    **texts_learning.TEXTS,
    **texts_memory.TEXTS,
    **texts_charts.TEXTS,
    **texts_compare.TEXTS,
    **texts_ablation.TEXTS,
    **texts_diagnosis.TEXTS,
    **texts_records.TEXTS,
}
"""English and Chinese by key; braces are places for values."""


class Words:
    """The page's texts in one language."""

    def __init__(self, lang: Lang) -> None:
        self.lang: Lang = lang
        self._index = LANGUAGES.index(lang)

    def __call__(self, key: str, /, **values: object) -> str:
        """The text of a key, with its values put in.

        Raises:
            KeyError: there is no such text, or a value that it needs is missing.
        """
        return TEXTS[key][self._index].format(**values)

    def number_of(self, unit: str, count: int) -> str:
        """'1 step', '24 steps': a count with its noun, of the texts `count.UNIT.one` and `count.UNIT.many`."""
        form = "one" if count == 1 else "many"
        return self(f"count.{unit}.{form}", count=f"{count:,}")

    def stage(self, name: str) -> str:
        """A stage as people call it; one that is not known stays as the records have it."""
        return texts(self.lang)["stages"].get(name, name)

    def status(self, name: str) -> str:
        """How a run stands; what is not known stays as the records have it."""
        return self(f"status.{name}") if f"status.{name}" in TEXTS else name

    def meaning(self, stage: str) -> str:
        """What a stage does; empty for one that is not known here."""
        return self(f"meaning.{stage}") if f"meaning.{stage}" in TEXTS else ""

    def cause(self, name: str) -> str:
        """A cause as people call it."""
        return cause_name(name, self.lang)

    def metric(self, name: str) -> str:
        """What a metric is: the schema's own words, or their Chinese where there is one."""
        english = spec_of(name).description
        if self.lang == "en":
            return english
        parts = name.split("/")
        of_any_source = f"reward/<source>/{parts[-1]}" if len(parts) == 3 else name
        return texts_metrics.CHINESE.get(name) or texts_metrics.CHINESE.get(of_any_source, english)

    def sentences(self, *parts: str) -> str:
        """Sentences one after another, as the language sets them."""
        return (" " if self.lang == "en" else "").join(part for part in parts if part)
