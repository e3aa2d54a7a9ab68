"""Final weights in Hugging Face format."""

import os
import shutil
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.checkpoint.layout import fsync
from paceline.checkpoint.snapshot import check_finite


def export_hf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path | str) -> Path:
    """Writes model and tokenizer to the folder `path`, which appears complete or not at all; returns it.

    An earlier export there is replaced once the new one is written.

    Raises:
        NonFiniteStateError: a weight is NaN or infinite; an earlier export stays.
    """
    path = Path(path)
    for name, parameter in model.named_parameters():
        check_finite(parameter, name)
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    if aside.exists():
        shutil.rmtree(aside)  # of an earlier process with our id
    try:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        for file in aside.iterdir():
            fsync(file)
        fsync(aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)  # the first error is the one to show
        raise
    if path.exists():
        replaced = path.with_name(f"{path.name}.old-{os.getpid()}")
        path.rename(replaced)
        aside.rename(path)
        shutil.rmtree(replaced)
    else:
        aside.rename(path)
    fsync(path.parent)
    return path
