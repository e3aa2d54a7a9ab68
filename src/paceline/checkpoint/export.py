"""Final weights in Hugging Face format, and folders that appear whole."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.checkpoint.layout import fsync
from paceline.checkpoint.snapshot import check_finite


def export_hf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path | str,
    state_dict: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes model and tokenizer to the folder `path`, which appears complete or not at all; returns it.

    An earlier export there is replaced once the new one is written. `state_dict` is written in place of the model's
    own weights: merged ones, where the model has adapters.

    Raises:
        NonFiniteStateError: a weight is NaN or infinite; an earlier export stays.
    """
    for name, tensor in state_dict.items() if state_dict is not None else model.named_parameters():
        check_finite(tensor, name)
    with replaced_folder(Path(path)) as aside:
        model.save_pretrained(aside, state_dict=None if state_dict is None else dict(state_dict))
        tokenizer.save_pretrained(aside)
    return Path(path)


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `path` on leaving: complete, or not at all.

    An earlier folder there is replaced once the new one is written; after an exception it stays.
    """
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    if aside.exists():
        shutil.rmtree(aside)  # of an earlier process with our id
    aside.mkdir(parents=True)
    try:
        yield aside
        for file in aside.iterdir():
            fsync(file)
        fsync(aside)
    except BaseException:  # whatever stopped the write, a partial folder must not stay behind; raised on
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
