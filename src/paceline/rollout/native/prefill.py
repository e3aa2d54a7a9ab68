"""The row in which admitted groups are computed: prompts once per group, a prefix common to all prompts once, and what
resumed samples had sampled before."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.batching.prefixes import PackItem, PackPlan, build_pack
from paceline.rollout.native.cache import PrefillTarget
from paceline.rollout.native.scheduler import Admission, RunningSample, start_sample


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """`pack` is the row, `targets` where its keys and values belong, `samples` who starts in it, in order of their
    slots, and `last_tokens` the row index that predicts each one's next token."""

    pack: PackPlan
    targets: tuple[PrefillTarget, ...]
    samples: tuple[RunningSample, ...]
    last_tokens: tuple[int, ...]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Length and first position of each segment: what its attention costs."""
        return [(s.length, int(self.pack.position_ids[s.start])) for s in self.pack.segments]


def cut_rows(admitted: Sequence[Admission], token_budget: int) -> list[list[Admission]]:
    """Cuts admissions into rows of at most `token_budget` tokens (a longer group gets a row of its own)."""
    rows: list[list[Admission]] = []
    used = 0
    for admission in admitted:
        length = num_tokens(admission)
        if not rows or used + length > token_budget:
            rows.append([])
            used = 0
        rows[-1].append(admission)
        used += length
    return rows


def num_tokens(admission: Admission) -> int:
    """Tokens of the prompt and of what its samples go on from."""
    return len(admission.submission.request.prompt.token_ids) + sum(
        len(prefix) for prefix in _prefixes(admission)
    )


def plan_row(admissions: Sequence[Admission], first_slot: int) -> PrefillRow:
    """Lays the admissions out in one row; their samples take the slots from `first_slot` on."""
    pack = build_pack(
        [PackItem(a.submission.request.prompt.token_ids, _prefixes(a)) for a in admissions],
        share_prefixes=True,
    )
    segments = iter(pack.segments)
    targets: list[PrefillTarget] = []
    samples: list[RunningSample] = []
    last_tokens: list[int] = []
    header = next(segments) if pack.segments[0].kind == "header" else None
    slot = first_slot
    for admission in admissions:
        body = next(segments)
        last_slot = slot + len(admission.sample_indices)
        offset = header.length if header else 0
        targets.append(PrefillTarget(body.start, body.length, offset, slot, last_slot))
        for index in admission.sample_indices:
            sample = start_sample(admission.submission, index)
            samples.append(sample)
            end = body.start + body.length
            if sample.tokens:
                prefix = next(segments)
                length = len(admission.submission.request.prompt.token_ids)
                targets.append(PrefillTarget(prefix.start, prefix.length, length, slot, slot + 1))
                end = prefix.start + prefix.length
            last_tokens.append(end - 1)
            slot += 1
    if header:
        targets.append(PrefillTarget(header.start, header.length, 0, first_slot, slot))
    return PrefillRow(pack, tuple(targets), tuple(samples), tuple(last_tokens))


def _prefixes(admission: Admission) -> tuple[tuple[int, ...], ...]:
    found = (admission.submission.prefix(index) for index in admission.sample_indices)
    return tuple(prefix.token_ids for prefix in found if prefix is not None and prefix.token_ids)
