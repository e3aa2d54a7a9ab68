"""Tokens to text as they come: no half characters, nothing behind a stop text."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_HALF = "\ufffd"


class TextStream:
    """The text of one choice. `add` gives what may be shown already; `finish` the rest."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stop_strings)
        self._ids: list[int] = []
        self._context, self._read = 0, 0
        self._held = ""
        self.is_stopped = False

    def add(self, token_ids: Sequence[int]) -> str:
        """New text after these tokens. Behind a stop text there is none, and `is_stopped` is true."""
        if self.is_stopped:
            return ""
        self._ids.extend(token_ids)
        known = self._decode(self._ids[self._context : self._read])
        text = self._decode(self._ids[self._context :])
        if text.endswith(_HALF) or len(text) <= len(known):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return self._released(text[len(known) :])

    def finish(self) -> str:
        """What was held back; half a character shows as the replacement character."""
        if self.is_stopped:
            return ""
        known = self._decode(self._ids[self._context : self._read])
        text = self._released(self._decode(self._ids[self._context :])[len(known) :])
        if self.is_stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _released(self, new: str) -> str:
        """Cuts at the first stop text, and holds back what may be the beginning of one."""
        text = self._held + new
        cuts = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if cuts:
            self.is_stopped, self._held = True, ""
            return text[: min(cuts)]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True)) if ids else ""


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
