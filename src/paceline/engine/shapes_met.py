"""Which shapes of micro-batches a process has met: kernels that plan or compile by shape pause at each new one."""

from paceline.telemetry.sections import NEW_SHAPE
from paceline.types import Stage


class ShapesMet:
    """Shapes (rows x width) by stage, and how the spans of a pass say whether its shape is new."""

    def __init__(self) -> None:
        self._shapes: set[tuple[Stage, int, int]] = set()

    def __len__(self) -> int:
        return len(self._shapes)

    def meet(self, stage: Stage, num_rows: int, width: int) -> str:
        """Notes a shape; returns how the names of its pass's spans end."""
        num_before = len(self._shapes)
        self._shapes.add((stage, num_rows, width))
        return NEW_SHAPE if len(self._shapes) > num_before else ""
