"""Device and host figures by stage: a sample belongs to the stage its rank was in when it was taken. Torch-free."""

from bisect import bisect_right

from paceline.telemetry.device.records import DeviceSample, RankDevice, mean_figures
from paceline.telemetry.records import RankLedger


def samples_by_stage(ledger: RankLedger, device: RankDevice) -> dict[str, list[DeviceSample]]:
    """A rank's samples by the stage of the outermost span that was open; those in no span are left out.

    CPU and GPM figures are means since the sample before, so they blur where stages are shorter than the interval.
    """
    starts: list[float] = []
    stretches: list[tuple[float, str]] = []
    for process in ledger.processes:
        for span in sorted((one for one in process.spans if one.depth == 0), key=lambda one: one.start_s):
            starts.append(process.unix_s + span.start_s)
            stretches.append((process.unix_s + span.end_s, span.stage))
    found: dict[str, list[DeviceSample]] = {}
    for sample in device.samples:
        index = bisect_right(starts, sample.unix_s) - 1
        if index >= 0 and sample.unix_s < stretches[index][0]:
            found.setdefault(stretches[index][1], []).append(sample)
    return found


def figures_by_stage(ledger: RankLedger, device: RankDevice) -> dict[str, dict[str, float]]:
    """Means of every figure by stage, and `num_samples` they rest on."""
    return {
        stage: {"num_samples": len(samples), **mean_figures(samples)}
        for stage, samples in samples_by_stage(ledger, device).items()
    }
