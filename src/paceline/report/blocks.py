"""What a page is made of: sections of blocks. One template draws every kind of page from them.

All texts are plain: the template escapes them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from paceline.report.details import DetailGroup
from paceline.report.sample_views import SampleStep
from paceline.report.theme import Chart
from paceline.report.tiles import Tile

Layout = Literal["one", "pair", "grid"]
Tone = Literal["", "good", "bad", "muted"]


@dataclass(frozen=True, slots=True)
class Fact:
    """A label with a short value, in the header."""

    label: str
    value: str


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column: text to the left, numbers to the right; `hides` says that a narrow page leaves it out."""

    label: str
    is_text: bool = False
    hides: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """A table's cell. `meter` is a bar of so many percent; `low`, `mid`, `high` a marked interval in percent of the
    cell's width; `colour` a swatch before the text, a CSS value."""

    text: str = ""
    is_code: bool = False
    tone: Tone = ""
    colour: str = ""
    meter: float | None = None
    low: float | None = None
    mid: float | None = None
    high: float | None = None
    zero: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A table's row; the first cell is its head."""

    cells: Sequence[Cell]
    is_fault: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A card with a table. A long one is folded away behind its title (`folded`)."""

    kind: ClassVar[str] = "table"
    title: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    foot: Row | None = None
    notes: Sequence[str] = ()
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Charts:
    """Charts side by side."""

    kind: ClassVar[str] = "charts"
    charts: Sequence[Chart]
    layout: Layout = "one"


@dataclass(frozen=True, slots=True)
class StripPart:
    """A stage in the strip and its legend; `width` in percent; on a pale colour the text is dark."""

    name: str
    meaning: str
    colour: str
    width: float
    share: str
    hint: str
    is_pale: bool = False


@dataclass(frozen=True, slots=True)
class Strip:
    """One bar cut into the parts of a whole, with a legend."""

    kind: ClassVar[str] = "strip"
    title: str
    label: str
    parts: Sequence[StripPart]


@dataclass(frozen=True, slots=True)
class Lines:
    """Short lines of text."""

    kind: ClassVar[str] = "lines"
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Item:
    """A statement of a ranked list: a head with its number at the right, a sentence, and small print."""

    head: str
    amount: str
    text: str
    details: Sequence[Fact] = ()
    code: Sequence[str] = ()
    bar: Cell | None = None


@dataclass(frozen=True, slots=True)
class Ranking:
    """A card with a ranked list."""

    kind: ClassVar[str] = "ranking"
    title: str
    caption: str
    items: Sequence[Item]


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of a few steps, and what all prompts begin with."""

    kind: ClassVar[str] = "samples"
    shared: str
    shared_hint: str
    steps: Sequence[SampleStep]


@dataclass(frozen=True, slots=True)
class Details:
    """Folded lists of names and values."""

    kind: ClassVar[str] = "details"
    groups: Sequence[DetailGroup]


Block = Table | Charts | Strip | Lines | Ranking | Samples | Details


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of the page; `key` is its anchor."""

    key: str
    title: str
    blocks: Sequence[Block]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A page's content in its order."""

    kind: str
    title: str
    status: str
    status_class: str
    facts: Sequence[Fact]
    sentences: Sequence[str]
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    footer: str
    notes: Sequence[str] = field(default=())

    @property
    def charts(self) -> list[Chart]:
        """All charts, in the order of the page."""
        blocks = (block for section in self.sections for block in section.blocks)
        return [chart for block in blocks if isinstance(block, Charts) for chart in block.charts]


def charts(found: Iterable[Chart | None], layout: Layout = "one") -> list[Block]:
    """The charts that are there as a block; no block for none. In a row of one, each stands alone."""
    present = [chart for chart in found if chart is not None]
    return [Charts(present, layout)] if present else []


def section(key: str, title: str, blocks: Sequence[Block], caption: str = "") -> list[Section]:
    """A section, unless there is nothing in it."""
    return [Section(key, title, blocks, caption)] if blocks else []
