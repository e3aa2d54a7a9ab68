"""What a person sees while a run trains: one live panel, or one line per step where there is no terminal."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from paceline.monitor.drawing import STAGE_COLOURS, format_seconds, sparkline


@dataclass(slots=True)
class _View:
    """Everything the panel shows."""

    title: str
    num_steps: int
    main_figure: str
    phase: str = "starting"
    step: int = 0
    main_values: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)


class Display:
    """Shows progress; `phase`, `step` and `note` are the only calls the driver makes."""

    def __init__(
        self,
        title: str,
        num_steps: int,
        mode: str = "auto",
        console: Console | None = None,
        main_figure: str = "reward",
    ) -> None:
        self.console = console or Console()
        self._view = _View(title, num_steps, main_figure)
        self._live: Live | None = None
        if mode == "on" or (mode == "auto" and self.console.is_terminal):
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def plan(self, num_steps: int) -> None:
        """Says how many steps there are, where that is known only later."""
        self._view.num_steps = num_steps

    def phase(self, text: str) -> None:
        """Says what is going on now, such as 'evaluating 96 held-out prompts'."""
        changed = text != self._view.phase
        self._view.phase = text
        if self._live is None and changed and self._view.step == 0:
            self.console.print(f"  {text} ...", highlight=False)

    def note(self, text: str) -> None:
        """Prints a line that stays."""
        self.console.print(text, highlight=False)

    def step(
        self,
        step: int,
        seconds: float,
        stages: Mapping[str, float],
        value: float,
        figures: Mapping[str, str],
    ) -> None:
        """Takes a finished step: its wall time, seconds by stage, the main figure (a run that samples: mean reward)
        and ready-made others."""
        view = self._view
        view.step = step
        view.main_values.append(value)
        view.step_seconds.append(seconds)
        for stage, spent in stages.items():
            view.stage_seconds[stage] = view.stage_seconds.get(stage, 0.0) + spent
        view.figures = dict(figures)
        if self._live is None:
            shown = " · ".join(f"{name} {value}" for name, value in figures.items())
            head = f"step {step}/{view.num_steps} · {seconds:.1f} s · {view.main_figure} {value:.3f}"
            self.console.print(f"{head} · {shown} · left {self._left()}", highlight=False)

    def _left(self) -> str:
        recent = self._view.step_seconds[-8:]
        if not recent:
            return "?"
        return format_seconds(sum(recent) / len(recent) * (self._view.num_steps - self._view.step))

    def _render(self) -> RenderableType:
        view = self._view
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=view.num_steps, completed=view.step, width=32)
        head.add_row(f"step {view.step}/{view.num_steps}", bar, f"time left {self._left()}")
        figures = Table.grid(padding=(0, 2))
        if view.main_values:
            figures.add_row(
                view.main_figure,
                f"{view.main_values[-1]:.3f}",
                Text(sparkline(view.main_values[-48:]), style="green"),
            )
        for name, value in view.figures.items():
            figures.add_row(name, value, "")
        return Panel(
            Group(head, Spinner("dots", Text(view.phase)), figures, self._stages()),
            title=view.title,
            border_style="dim",
        )

    def _stages(self) -> RenderableType:
        total = sum(self._view.stage_seconds.values())
        table = Table.grid(padding=(0, 1))
        ordered = sorted(self._view.stage_seconds.items(), key=lambda item: -item[1])
        for stage, seconds in ordered:
            share = seconds / total if total else 0.0
            if share < 0.005:
                continue
            bar = Text("█" * max(1, round(share * 40)), style=STAGE_COLOURS.get(stage, "white"))
            table.add_row(f"{stage:<13}", f"{share:4.0%}", bar)
        return table


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Elapsed time."""
        return time.perf_counter() - self._start
