"""vLLM in the same process as its caller. It needs both in one environment, so that a script runs in vLLM's."""

import os
import subprocess
from pathlib import Path

from small_models import write_small_model

from paceline.config.engine_schema import VllmSection
from paceline.rollout.vllm.arguments import FOREIGN, process_environment

HERE = Path(__file__).parent


def test_tensors_handed_over_in_one_process_are_what_samples_come_from(python, tmp_path):
    folder = write_small_model(tmp_path / "model")
    environment = {**os.environ, **process_environment(VllmSection(mode="colocated"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "src"), str(FOREIGN)])
    script = subprocess.run(
        [python, str(HERE / "colocated_script.py"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert "colocated: equal" in script.stdout, script.stdout[-2000:] + script.stderr[-4000:]
