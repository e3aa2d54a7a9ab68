"""Lay groups of samples out in one packed row, a token prefix they share only once.

A row is a tree of segments: an optional *header* (the prefix all prompts share), under it one *prompt* remainder per
item, under it that prompt's *responses*. Without sharing every prompt + response is a *sequence* of its own. Labels
follow from this structure, never from token values.

Shapes: T tokens of the row, R response tokens in row order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
SegmentKind = Literal["header", "prompt", "response", "sequence", "padding"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, start + length) of the row. `parent` is the index of the segment it continues, -1 for none."""

    start: int
    length: int
    parent: int
    kind: SegmentKind


@dataclass(frozen=True, slots=True)
class PackItem:
    """A prompt's token ids and those of its responses; no responses when only the prompt is computed."""

    prompt: Sequence[int]
    responses: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class PackPlan:
    """One packed row.

    `segments` in row order, parents before children, a prompt's responses right behind it. `token_ids`,
    `position_ids`: [T]; positions continue after the parent. `source`: [R] row index whose hidden state predicts the
    response token; `targets`: [R] its id; `item_index`, `response_index`: [R] whose token it is.
    """

    segments: tuple[Segment, ...]
    token_ids: IntArray
    position_ids: IntArray
    source: IntArray
    targets: IntArray
    item_index: IntArray
    response_index: IntArray


@dataclass(slots=True)
class _Row:
    """A row under construction."""

    segments: list[Segment] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    position_ids: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    item_index: list[int] = field(default_factory=list)
    response_index: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int], parent: int, kind: SegmentKind, first_position: int) -> int:
        """Appends a segment and returns its index."""
        self.segments.append(Segment(len(self.token_ids), len(tokens), parent, kind))
        self.token_ids.extend(tokens)
        self.position_ids.extend(range(first_position, first_position + len(tokens)))
        return len(self.segments) - 1

    def label(self, response: Sequence[int], predictor: int, start: int, item: int, number: int) -> None:
        """Notes a response whose first token is predicted at `predictor` and that begins at `start`."""
        self.source.append(predictor)
        self.source.extend(range(start, start + len(response) - 1))
        self.targets.extend(response)
        self.item_index.extend([item] * len(response))
        self.response_index.extend([number] * len(response))

    def freeze(self) -> PackPlan:
        """The finished plan."""
        return PackPlan(
            tuple(self.segments),
            *(
                np.asarray(values, dtype=np.int64)
                for values in (
                    self.token_ids,
                    self.position_ids,
                    self.source,
                    self.targets,
                    self.item_index,
                    self.response_index,
                )
            ),
        )


def build_pack(items: Sequence[PackItem], share_prefixes: bool, min_header: int = 16) -> PackPlan:
    """Lays `items` out in one row, in order.

    Raises:
        ValueError: a prompt or a response is empty: it has no token to predict from, or none to predict.
    """
    for number, item in enumerate(items):
        if not item.prompt or not all(item.responses):
            raise ValueError(f"item {number}: an empty prompt or response cannot be packed")
    row = _Row()
    if not share_prefixes:
        for number, item in enumerate(items):
            _add_sequences(row, item, number)
        return row.freeze()
    length = header_length([item.prompt for item in items], min_header)
    header = row.add(items[0].prompt[:length], -1, "header", 0) if length else -1
    for number, item in enumerate(items):
        _add_group(row, item, number, header, length)
    return row.freeze()


def pad_pack(pack: PackPlan, total: int) -> PackPlan:
    """The row filled up to `total` tokens with a segment of padding: a sequence of its own, which no other token
    attends to and in which nothing is predicted.

    Raises:
        ValueError: the row is longer than `total`.
    """
    num_tokens = len(pack.token_ids)
    missing = total - num_tokens
    if missing < 0:
        raise ValueError(f"a row of {num_tokens} tokens cannot be filled up to {total}")
    if missing == 0:
        return pack
    padding = Segment(num_tokens, missing, -1, "padding")
    return replace(
        pack,
        segments=(*pack.segments, padding),
        token_ids=np.pad(pack.token_ids, (0, missing)),
        position_ids=np.concatenate([pack.position_ids, np.arange(missing, dtype=np.int64)]),
    )


def _add_sequences(row: _Row, item: PackItem, number: int) -> None:
    if not item.responses:
        row.add(item.prompt, -1, "sequence", 0)
    for index, response in enumerate(item.responses):
        start = len(row.token_ids) + len(item.prompt)
        row.add([*item.prompt, *response], -1, "sequence", 0)
        row.label(response, start - 1, start, number, index)


def _add_group(row: _Row, item: PackItem, number: int, header: int, header_tokens: int) -> None:
    prompt = row.add(item.prompt[header_tokens:], header, "prompt", header_tokens)
    predictor = len(row.token_ids) - 1
    for index, response in enumerate(item.responses):
        start = len(row.token_ids)
        row.add(response, prompt, "response", len(item.prompt))
        row.label(response, predictor, start, number, index)


def header_length(prompts: Sequence[Sequence[int]], min_header: int = 16) -> int:
    """Tokens of the prefix that all prompts share, leaving each at least one token of its own.

    0 when there are fewer than two prompts or the prefix is shorter than `min_header`: it would save too little.
    """
    if len(prompts) < 2:
        return 0
    first, last = min(map(tuple, prompts)), max(map(tuple, prompts))  # the two that differ earliest
    limit = min(len(prompt) for prompt in prompts) - 1
    length = 0
    while length < limit and first[length] == last[length]:
        length += 1
    return length if length >= min_header else 0


def join_only_children(segments: Sequence[Segment]) -> list[Segment]:
    """The same tree with every segment that has one child joined with it: what nobody else shares is one sequence.

    `segments` stand in row order, parents before children, a parent right before its first child.
    """
    num_children = [0] * len(segments)
    for segment in segments:
        if segment.parent >= 0:
            num_children[segment.parent] += 1
    joined: list[Segment] = []
    place: list[int] = []
    for segment in segments:
        parent = segment.parent
        if parent >= 0 and num_children[parent] == 1:
            above = joined[place[parent]]
            length = above.length + segment.length
            joined[place[parent]] = Segment(above.start, length, above.parent, "sequence")
            place.append(place[parent])
        else:
            place.append(len(joined))
            joined.append(
                Segment(segment.start, segment.length, -1 if parent < 0 else place[parent], segment.kind)
            )
    return joined
