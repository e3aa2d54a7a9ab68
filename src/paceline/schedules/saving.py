"""What a checkpoint of a run holds, and how a run takes it up again."""

from typing import Any

from torch import Tensor

from paceline.config import ConfigError
from paceline.schedules.setup import Run


def save(run: Run) -> float:
    """Saves after the step just finished; returns the seconds the loop was blocked.

    Working weights are not stored beside float32 masters: they follow from them bit by bit.
    """
    optimizer = run.trainer.optimizer
    tensors: dict[str, dict[str, Tensor]] = {
        "masters": optimizer.masters(),
        "moments": optimizer.moments(),
    }
    state: dict[str, Any] = {
        "step": run.state.step,
        "figures": run.state.figures,
        "optimizer": optimizer.state(),
        "loader": run.loader.state_dict(),
        "weight_version": run.engine.weight_version,
        "seed": run.config.run.seed,
    }
    with run.ledger.span("checkpoint"):
        return run.store.save(run.state.step, tensors, state, asynchronous=run.config.checkpoint.asynchronous)


def resume(run: Run) -> bool:
    """Continues from the newest complete checkpoint, if there is one; says which and why newer ones were passed over.

    Raises:
        ConfigError: `run.resume` is "must" and there is none, or the master seed changed.
    """
    with run.ledger.span("setup", "resume"):
        found = run.store.latest() if run.folder.resumes else None
        if found is None:
            if run.config.run.resume == "must":
                raise ConfigError(
                    "run.resume", "must", f"{run.folder.path} holds no complete checkpoint", "auto"
                )
            return False
        for path, reason in found.skipped:
            run.display.note(f"  checkpoint {path.name} skipped: {reason}")
        loaded = run.store.load(found.path)
        if loaded.state["seed"] != run.config.run.seed:
            raise ConfigError(
                "run.seed",
                run.config.run.seed,
                "a resumed run keeps its master seed, or prompts and samples would repeat",
                str(loaded.state["seed"]),
            )
        run.trainer.optimizer.load(
            loaded.tensors["masters"], loaded.tensors.get("moments", {}), loaded.state["optimizer"]
        )
        run.loader.load_state_dict(loaded.state["loader"])
        run.engine.weight_version = loaded.state["weight_version"]
        run.state.step = loaded.state["step"]
        run.state.figures = loaded.state["figures"]
    run.display.note(f"  resumed after step {run.state.step} from {found.path}")
    return True
