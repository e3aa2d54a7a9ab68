"""The paged engine: pages of a shared pool, continuous batching, preemption; the same samples as the slot engine's.

Files, from the host to the device: `pages.py` (who holds which page), `slots.py` (running samples as arrays),
`scheduler.py` (what a round computes), `engine.py` (the protocol), `runner.py` (a round on the device), `cache.py` and
`attention.py` (keys, values and the kernels that read them).
"""

from paceline.rollout.native.paged.engine import PagedEngine, PagedLimits

__all__ = ["PagedEngine", "PagedLimits"]
