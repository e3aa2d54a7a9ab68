"""The seed tree: every random choice of a run hangs from the master seed by a path that says what it is for.

Seeds are hashes, not counters, so no two uses collide by arithmetic, and a seed does not depend on the order in which
seeds were asked for, on the process, or on the Python version.
"""

from hashlib import blake2b

SEED_BITS = 63
"""Seeds fit a signed 64-bit integer and are never negative."""


def child_seed(master: int, *path: str | int) -> int:
    """Seed in [0, 2**63) for the use that `path` names, as in `child_seed(seed, "order", epoch)`.

    Text and numbers are told apart, and so are ("ab", "c") and ("a", "bc").
    """
    digest = blake2b(digest_size=8)
    for part in (master, *path):
        kind = b"i" if isinstance(part, int) else b"s"
        encoded = str(part).encode()
        digest.update(kind + len(encoded).to_bytes(8, "big") + encoded)
    return int.from_bytes(digest.digest(), "big") >> (64 - SEED_BITS)


def sample_seed(master: int, prompt_id: str, sample_index: int, step: int) -> int:
    """Seed in [0, 2**63) of one sample's random numbers: it does not depend on the batch the sample is in."""
    return child_seed(master, "sample", prompt_id, sample_index, step)
