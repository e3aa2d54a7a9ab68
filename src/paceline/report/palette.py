"""One colour per stage in every chart, in a light and a dark version."""

from dataclasses import dataclass

from paceline.types import STAGES, Cause

UNACCOUNTED = "unaccounted"
"""Time no span covers; drawn like a stage, in a colour of its own."""

SETUP = "setup"
"""Ledger stage of work outside steps."""


@dataclass(frozen=True, slots=True)
class Colour:
    """The same meaning on a light and on a dark page."""

    light: str
    dark: str


STAGE_COLOURS: dict[str, Colour] = {
    "rollout": Colour("#3d6fd1", "#6f9cf2"),
    "update_actor": Colour("#12917f", "#3cbfa9"),
    "tools": Colour("#c25b3c", "#e08a6d"),
    "reward": Colour("#df8f2f", "#edae5f"),
    "old_logprob": Colour("#7e5bbf", "#a58ae0"),
    "ref_logprob": Colour("#ae8ddb", "#c8b2ea"),
    "values": Colour("#df93bf", "#f0b3d4"),
    "advantage": Colour("#b09a34", "#d2be60"),
    "update_critic": Colour("#5e8c3a", "#8aba64"),
    "sync": Colour("#2596bd", "#5ac0e0"),
    "checkpoint": Colour("#8a6b56", "#b6957f"),
    "eval": Colour("#a8447f", "#cf74ab"),
    "data": Colour("#66768d", "#94a4bb"),
    "idle": Colour("#c1c9d4", "#4a5565"),
    SETUP: Colour("#97a3b4", "#6d7b90"),
    UNACCOUNTED: Colour("#d13f3f", "#ff6f6f"),
}

CAUSE_COLOURS: dict[Cause, Colour] = {
    "compute": Colour("#1b8a6a", "#45c29c"),
    "memory": Colour("#cf902a", "#e5b35d"),
    "communication": Colour("#8356c5", "#ac89eb"),
    "scheduling": Colour("#c1567a", "#e48585"),
    "queue": Colour("#8993a2", "#6e7989"),
    "data": Colour("#2e7ec3", "#61a8e9"),
}

HEAT = (
    Colour("#eef3fc", "#1b2433"),
    Colour("#c3d5f5", "#29456f"),
    Colour("#86abe8", "#3a68ac"),
    Colour("#4479d4", "#5f93e8"),
    Colour("#20478f", "#b7d0fa"),
)
"""From little to much, for heat maps."""

LINES = (
    Colour("#3c6fd3", "#6f9cf4"),
    Colour("#df902f", "#edae61"),
    Colour("#12927f", "#3cbfa8"),
    Colour("#a9447f", "#cf74aa"),
    Colour("#7e5bc0", "#a58ae1"),
    Colour("#b09b34", "#d2be61"),
)
"""Lines of one chart that are neither stages nor causes, in this order and then again."""

_OTHER = Colour("#7d8896", "#8b97a7")

INK = Colour("#1c2430", "#e8ebf0")
MUTED = Colour("#5d6878", "#9aa5b5")
GRID = Colour("#e5e9ef", "#2b323d")
SURFACE = Colour("#ffffff", "#171b22")
ACCENT = Colour("#3d6fd2", "#6f9cf3")  # a digit off the rollout's blue, so that each can be mapped by itself
SECOND = Colour("#e0902f", "#edae60")
FAINT = Colour("#b4c6ea", "#3d5486")
REFERENCE = Colour("#8d97a5", "#7f8b9c")
STEP_SHADES = (Colour("#8fabe3", "#41639f"), Colour("#b9cbf0", "#2f4a7c"))
ON_STAGE = Colour("#fffffe", "#11151b")  # text on a stage's colour

TRAINING_STAGES = ("update_actor", "update_critic")

_ORDER = {name: index for index, name in enumerate((*STAGES, SETUP))}


def colour_of(stage: str) -> Colour:
    """The stage's colour; one grey for stages this version does not know."""
    return STAGE_COLOURS.get(stage, _OTHER)


def stage_variable(stage: str) -> str:
    """The stage's colour as a CSS variable, for the page's own elements."""
    return f"var(--stage-{stage})" if stage in STAGE_COLOURS else "var(--other)"


def heat_scale() -> list[list[float | str]]:
    """The heat map's colours as Plotly takes them."""
    return [[index / (len(HEAT) - 1), colour.light] for index, colour in enumerate(HEAT)]


def line_colour(index: int) -> Colour:
    """The colour of a chart's line by its number."""
    return LINES[index % len(LINES)]


def ordered(stages: set[str]) -> list[str]:
    """Stages in the order in which a step runs them; unknown ones after, unaccounted last."""
    last = len(_ORDER)
    return sorted(stages, key=lambda name: (name == UNACCOUNTED, _ORDER.get(name, last), name))


def dark_by_light() -> dict[str, str]:
    """Maps every light colour the charts use to its dark version; the page swaps them."""
    page = (_OTHER, INK, MUTED, GRID, SURFACE, ACCENT, SECOND, FAINT, REFERENCE, ON_STAGE, *STEP_SHADES)
    drawn = (*STAGE_COLOURS.values(), *CAUSE_COLOURS.values(), *HEAT, *LINES)
    return {colour.light: colour.dark for colour in (*drawn, *page)}


def css_variables(dark: bool) -> str:
    """The palette as CSS custom properties: `--stage-rollout: #...;` and so on."""
    named = {f"stage-{name}": colour for name, colour in STAGE_COLOURS.items()}
    named |= {f"cause-{name}": colour for name, colour in CAUSE_COLOURS.items()}
    named |= {f"line-{index}": colour for index, colour in enumerate(LINES)}
    named |= {"other": _OTHER, "ink": INK, "muted": MUTED, "grid": GRID, "surface": SURFACE, "accent": ACCENT}
    return " ".join(f"--{name}: {c.dark if dark else c.light};" for name, c in named.items())
