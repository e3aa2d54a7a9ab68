"""Every text of the page, in English and Chinese: one place, both languages side by side."""

from paceline.report.words.lookup import LANGUAGES, Lang, Words, languages

__all__ = ["LANGUAGES", "Lang", "Words", "languages"]
