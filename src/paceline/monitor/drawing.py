"""Small things that panels in the terminal are made of."""

from collections.abc import Sequence

STAGE_COLOURS = {
    "rollout": "cyan",
    "update_actor": "green",
    "update_critic": "bright_green",
    "values": "bright_yellow",
    "tools": "bright_magenta",
    "reward": "magenta",
    "old_logprob": "yellow",
    "ref_logprob": "yellow",
    "sync": "blue",
    "checkpoint": "red",
    "eval": "bright_blue",
    "data": "white",
    "advantage": "white",
    "idle": "bright_black",
    "unaccounted": "bright_red",
}

_SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """Values as a row of block characters, lowest to highest."""
    low, high = min(values), max(values)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in values)


def format_seconds(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    clock = f"{rest // 60}:{rest % 60:02d}"
    return f"{hours}:{clock.zfill(5)}" if hours else clock
