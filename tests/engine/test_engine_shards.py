"""Parts of parameters that do not divide: put together they are the whole, and each is counted once."""

import pytest
from rank_faults import parts_and_wholes
from rank_pool import RankPool

from paceline.config.parallelism import MeshSizes


@pytest.mark.parametrize(
    ("sizes", "copies"),
    [
        (MeshSizes(shard=4), {"a": 1, "b": 1, "c": 1, "d": 1}),
        (MeshSizes(replicate=2, shard=2), {"a": 2, "b": 2, "c": 2, "d": 2}),
        # a and d are cut by tensor parallelism too, b and c are the same on both of its ranks
        (MeshSizes(shard=2, tensor_parallel=2), {"a": 1, "b": 2, "c": 2, "d": 1}),
    ],
    ids=str,
)
def test_parts_make_the_whole_again_and_say_how_many_hold_them(sizes, copies, ranks: RankPool):
    found = ranks.run(4, parts_and_wholes, sizes)
    for by_name in found:
        for name, (is_whole, is_part, num_copies, _) in by_name.items():
            assert is_whole and is_part, name
            assert num_copies == copies[name], name
    for name, entries in {"a": 21, "b": 6, "c": 1, "d": 36}.items():
        held = 0
        for by_name in found:
            shape, size = by_name[name][3], 1
            for dim in shape:
                size *= dim
            held += size
        assert held == entries * copies[name], name
