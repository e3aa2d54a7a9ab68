"""Every text of the page, in English and Chinese: one place, both languages side by side."""

from paceline.report.words.lookup import Lang, Words

__all__ = ["Lang", "Words"]
