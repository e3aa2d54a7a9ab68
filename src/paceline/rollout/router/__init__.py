"""Several rollout engines behind one queue."""

from paceline.rollout.router.balance import Balancer
from paceline.rollout.router.router import ReplicaRouter
from paceline.rollout.router.settings import RouterSettings

__all__ = ["Balancer", "ReplicaRouter", "RouterSettings"]
