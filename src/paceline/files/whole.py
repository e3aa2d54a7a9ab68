"""One file replaced at once. What has to be on disk before it counts, a checkpoint's files, is `checkpoint/`'s own."""

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes `text` aside and moves it to `path`: whoever reads finds the earlier file or this one, never a part.

    Where it cannot be written (a full disk), the earlier file stays and no draft beside it.
    """
    draft = path.with_name(f".{path.name}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):  # what cannot be removed either is written over by the next attempt
            draft.unlink(missing_ok=True)
        raise
