"""What devices and hosts were doing while the run went on, sampled: utilisation, power, clocks, processor time."""

from collections.abc import Callable, Mapping, Sequence

import plotly.graph_objects as go

from paceline.report import formats
from paceline.report.palette import line_colour
from paceline.report.theme import Chart, Variant, chart_of_variants, new_figure
from paceline.report.words import Words
from paceline.telemetry.device.records import DeviceFigures, DeviceSample, HostFigures, RankDevice

_MAX_POINTS = 700
"""Points of a line; more samples are averaged in equal stretches of time."""

_MAX_LINES = 6
"""Ranks drawn one by one; of more, the least, the mean and the greatest."""

_GIB = 2**30

_DEVICE: Mapping[str, tuple[Callable[[DeviceFigures], float | None], str]] = {
    "utilization": (lambda one: one.utilization, ".0%"),
    "sm": (lambda one: one.sm_activity, ".0%"),
    "tensor": (lambda one: one.tensor_activity, ".0%"),
    "dram": (lambda one: one.dram_activity, ".0%"),
    "power": (lambda one: one.power_w, ".3~s"),
    "sm-clock": (lambda one: one.sm_clock_mhz, ",.0f"),
    "memory-clock": (lambda one: one.memory_clock_mhz, ",.0f"),
    "temperature": (lambda one: one.temperature_c, ".3~g"),
    "memory": (lambda one: None if one.memory_used is None else one.memory_used / _GIB, ".3~g"),
}
_HOST: Mapping[str, tuple[Callable[[HostFigures], float | None], str]] = {
    "process-cpu": (lambda one: one.process_cpu, ".3~g"),
    "children-cpu": (lambda one: one.children_cpu, ".3~g"),
    "host-cpu": (lambda one: one.host_cpu, ".3~g"),
    "process-memory": (lambda one: one.process_rss / _GIB, ".3~g"),
    "host-memory": (lambda one: one.host_memory_used / _GIB, ".3~g"),
}

Line = list[tuple[float, float]]


def device_chart(devices: Sequence[RankDevice], words: Words) -> Chart | None:
    """The devices' figures over the run, one at a time; None where no device was sampled."""
    variants = []
    for key, (figure_of, form) in _DEVICE.items():

        def read(
            sample: DeviceSample, of: Callable[[DeviceFigures], float | None] = figure_of
        ) -> float | None:
            return None if sample.device is None else of(sample.device)

        variants += _variant(f"device.{key}", form, devices, read, words)
    return chart_of_variants("device", words("device.title"), words("device.caption"), variants)


def host_chart(devices: Sequence[RankDevice], words: Words) -> Chart | None:
    """The host's figures over the run, one at a time; None where it was not sampled."""
    variants = []
    for key, (figure_of, form) in _HOST.items():

        def read(sample: DeviceSample, of: Callable[[HostFigures], float | None] = figure_of) -> float | None:
            return None if sample.host is None else of(sample.host)

        variants += _variant(f"host.{key}", form, devices, read, words)
    return chart_of_variants("host", words("host.title"), words("host.caption"), variants)


def _variant(
    key: str,
    form: str,
    devices: Sequence[RankDevice],
    read: Callable[[DeviceSample], float | None],
    words: Words,
) -> list[Variant]:
    """The figure's chart, or none where no rank has it."""
    origin = min((device.samples[0].unix_s for device in devices if device.samples), default=0.0)
    lines = {device.rank: points_of(device.samples, origin, read) for device in devices}
    lines = {rank: line for rank, line in lines.items() if line}
    if not lines or not any(value for line in lines.values() for _, value in line):
        return []
    end_s = max(line[-1][0] for line in lines.values())
    scale, unit = formats.time_unit(end_s)
    figure = new_figure(showlegend=len(lines) > 1, hovermode="x unified")
    for index, (label, line) in enumerate(_shown(lines, words)):
        figure.add_trace(
            go.Scatter(
                name=label,
                x=[round(x / scale, 5) for x, _ in line],
                y=[float(f"{y:.5g}") for _, y in line],
                mode="lines",
                line={"color": line_colour(index).light, "width": 1.7},
                hovertemplate="%{y:" + form + "}",
            )
        )
    figure.update_xaxes(title_text=words(f"run.axis-{unit}"))
    figure.update_yaxes(tickformat=form, rangemode="tozero", title_text=words(f"{key}-unit"))
    return [Variant(words(key), figure, 250)]


def points_of(
    samples: Sequence[DeviceSample], origin: float, read: Callable[[DeviceSample], float | None]
) -> Line:
    """(seconds since `origin`, value), at most 700 of them: neighbours are averaged."""
    points = [(one.unix_s - origin, value) for one in samples if (value := read(one)) is not None]
    size = -(-len(points) // _MAX_POINTS)
    runs = (points[start : start + size] for start in range(0, len(points), max(1, size)))
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def _shown(lines: Mapping[int, Line], words: Words) -> list[tuple[str, Line]]:
    if len(lines) <= _MAX_LINES:
        return [(words("device.rank", rank=rank), line) for rank, line in lines.items()]
    length = min(len(line) for line in lines.values())
    columns = [[line[index] for line in lines.values()] for index in range(length)]
    times = [sum(x for x, _ in column) / len(column) for column in columns]
    values = [[y for _, y in column] for column in columns]
    return [
        (words("device.mean"), [(t, sum(v) / len(v)) for t, v in zip(times, values, strict=True)]),
        (words("device.least"), [(t, min(v)) for t, v in zip(times, values, strict=True)]),
        (words("device.most"), [(t, max(v)) for t, v in zip(times, values, strict=True)]),
    ]
