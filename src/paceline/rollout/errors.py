"""How rollout engines outside the trainer's process fail."""


class ReplicaError(RuntimeError):
    """A rollout engine outside the trainer's process failed; the message names it, the stage and the cause."""

    def __init__(self, replica: str, cause: str, stage: str = "rollout") -> None:
        self.replica, self.cause, self.stage = replica, cause, stage
        super().__init__(f"rollout worker {replica}, stage {stage}: {cause}")


class ReplicaDiedError(ReplicaError):
    """Its process is gone, or silent for too long: nothing more will come from it."""


class ReplicaRefusedError(ReplicaError):
    """It is alive and says no."""
