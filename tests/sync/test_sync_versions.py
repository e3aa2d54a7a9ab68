"""Case 30: the engine's weights are the trainer's, and a version moves only when that is proven."""

import pytest
import torch
from tiny_models import tiny_model

from paceline.sync import InProcessSync, WeightSyncError, fingerprint
from paceline.telemetry.ledger import Ledger


class Engine:
    """Whatever tags samples with a version."""

    weight_version = 0


def test_a_step_changes_the_fingerprint_and_both_sides_share_it():
    model, engine = tiny_model().module, Engine()
    before = fingerprint(model.named_parameters())
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)
    assert fingerprint(model.named_parameters()) != before
    InProcessSync(engine, model.named_parameters, model.named_parameters, Ledger()).publish(3, verify=True)
    assert engine.weight_version == 3


def test_a_transfer_that_did_not_arrive_is_an_error_and_the_version_stays():
    model, engine = tiny_model().module, Engine()
    zeros = [(name, torch.zeros_like(p)) for name, p in model.named_parameters()]
    sync = InProcessSync(engine, model.named_parameters, lambda: zeros, Ledger())
    with pytest.raises(WeightSyncError, match="weight version 4"):
        sync.publish(4, verify=True)
    assert engine.weight_version == 0
