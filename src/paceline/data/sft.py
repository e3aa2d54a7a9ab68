"""Supervised rows: conversations rendered once into tokens and a mask, with every row that is left out counted."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from paceline.config.arithmetic import stated_context
from paceline.config.errors import ConfigError
from paceline.config.schema import Config
from paceline.data.assistant_mask import MaskedTokens, PrefixViolationError, TurnTokenizer
from paceline.data.chat import ChatTokenizer, PromptRenderer
from paceline.data.demonstrations import Demonstration, read_demonstrations
from paceline.data.prompts import Example


@dataclass(frozen=True, slots=True)
class SftRow:
    """One row to learn from. `prompt_id` is stable across epochs and resumes; the mask is 1 on learned tokens."""

    prompt_id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    text: str

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that are learned."""
        return sum(self.loss_mask)


@dataclass(slots=True)
class RowCounts:
    """What happened to rows on the way, training and held-out ones together."""

    mismatched: int = 0
    split: int = 0
    overlong_dropped: int = 0
    truncated: int = 0
    tokens_truncated: int = 0
    without_loss_tokens: int = 0
    without_end_token: int = 0
    duplicates: int = 0


@dataclass(frozen=True, slots=True)
class SftData:
    """Rows to train on and to measure on; `notes` are sentences for the person."""

    train: tuple[SftRow, ...]
    evaluation: tuple[SftRow, ...]
    counts: RowCounts
    notes: tuple[str, ...] = field(default=())

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(len(row.token_ids) for row in (*self.train, *self.evaluation))


def build_sft_data(config: Config, tokenizer: ChatTokenizer, max_context: int | None = None) -> SftData:
    """Reads, splits, renders and tokenises all rows.

    `max_context` is what the model states, in tokens; `model.max_context` and then `sft.max_length` overrule it.

    Raises:
        ConfigError: nothing is left to train on, or a row is over-long or mismatched and may not be left out.
    """
    demonstrations = read_demonstrations(config)
    renderer = _RowRenderer(config, tokenizer, demonstrations.shown)
    limit = _length_limit(config, max_context)
    counts = RowCounts(duplicates=demonstrations.num_duplicates)
    train = _rows(config, renderer, demonstrations.train, limit, counts)
    evaluation = _rows(config, renderer, demonstrations.evaluation, limit, counts)
    if not train:
        rule = f"no row is left to learn from of {len(demonstrations.train)}: {_sentence(counts, limit)}"
        raise ConfigError("task.path", config.task.path or config.task.name, rule)
    if demonstrations.evaluation and not evaluation:
        rule = f"no held-out row is left of {len(demonstrations.evaluation)}: {_sentence(counts, limit)}"
        raise ConfigError("task.eval_size", config.task.eval_size, rule)
    notes = [*demonstrations.notes]
    if left_out := _sentence(counts, limit):
        notes.append(left_out)
    return SftData(tuple(train), tuple(evaluation), counts, tuple(notes))


def _length_limit(config: Config, max_context: int | None) -> int | None:
    """Longest row in tokens, None where neither the recipe nor the model says."""
    context = config.model.max_context or max_context or stated_context(config.model.path)
    wanted = config.sft.max_length
    if wanted is not None and context is not None and wanted > context:
        raise ConfigError("sft.max_length", wanted, f"the model reads at most {context} tokens", str(context))
    return wanted or context


class _RowRenderer:
    """Demonstrations to tokens, through the chat template or as plain text."""

    def __init__(self, config: Config, tokenizer: ChatTokenizer, shown: Sequence[Example]) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._prompts = PromptRenderer(config, tokenizer, shown)
        self._end_token = tokenizer.eos_token_id
        self._turns = TurnTokenizer(
            tokenizer, self._prompts.template, self._end_token, config.model.chat_template
        )

    def rows(self, demonstration: Demonstration) -> list[MaskedTokens]:
        """One row, or with `sft.mismatched: split` one per assistant turn where the whole does not line up.

        Raises:
            PrefixViolationError: the row does not line up, and is not to be split (or splitting does not help).
        """
        if not self._config.task.use_chat_template:
            return [self._plain(demonstration)]
        where = demonstration.where
        if demonstration.example is not None:
            messages = self._prompts.messages(demonstration.example)
            first_learned = len(messages)  # worked examples are context, the same in every row
            messages = [*messages, {"role": "assistant", "content": demonstration.example.answer or ""}]
        else:
            assert demonstration.messages is not None
            messages, first_learned = list(demonstration.messages), 0
        try:
            return [self._turns.tokens(messages, where, first_learned)]
        except PrefixViolationError:
            if self._config.sft.mismatched != "split":
                raise
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first_learned]
        return [self._turns.tokens(messages[: i + 1], where, last_turn_only=True) for i in turns]

    def _plain(self, demonstration: Demonstration) -> MaskedTokens:
        if demonstration.example is None:
            rule = f"{demonstration.where} is a conversation, which only a chat template can render"
            raise ConfigError("task.use_chat_template", False, rule, "true")
        prompt = self._prompts.render(demonstration.example)
        answer = demonstration.example.answer or ""
        # tokenised apart from the prompt, as a rollout will see the prompt; the end token teaches where to stop
        ids = tuple(self._tokenizer(answer, add_special_tokens=False)["input_ids"])
        ids = ids if self._end_token is None else (*ids, self._end_token)
        mask = (0,) * len(prompt.token_ids) + (1,) * len(ids)
        text = f"{prompt.text}{answer}"
        return MaskedTokens((*prompt.token_ids, *ids), mask, text, self._end_token is not None)


def _rows(
    config: Config,
    renderer: _RowRenderer,
    demonstrations: Sequence[Demonstration],
    limit: int | None,
    counts: RowCounts,
) -> list[SftRow]:
    rows: list[SftRow] = []
    for demonstration in demonstrations:
        try:
            found = renderer.rows(demonstration)
        except PrefixViolationError as error:
            _refuse_mismatch(config, error)
            counts.mismatched += 1
            continue
        counts.split += len(found) > 1
        for number, tokens in enumerate(found):
            row_id = demonstration.row_id if len(found) == 1 else f"{demonstration.row_id}.{number}"
            if (row := _fitted(config, row_id, demonstration.where, tokens, limit, counts)) is not None:
                rows.append(row)
    return rows


def _refuse_mismatch(config: Config, error: PrefixViolationError) -> None:
    if config.sft.mismatched != "refuse":
        return
    rule = (
        f"{error} is tokenised differently in the whole conversation than on its own, so the model would learn after "
        "a context it never sees; split makes one row of every assistant turn, drop leaves such rows out and counts "
        "them, and another model.chat_template may not have the problem"
    )
    raise ConfigError("sft.mismatched", "refuse", rule, "split") from error


def _fitted(
    config: Config, row_id: str, where: str, tokens: MaskedTokens, limit: int | None, counts: RowCounts
) -> SftRow | None:
    """The row within `limit` tokens; None when it is left out, which is counted."""
    ids, mask = tokens.token_ids, tokens.loss_mask
    counts.without_end_token += not tokens.has_end
    if limit is not None and len(ids) > limit:
        if config.sft.overlong == "refuse":
            rule = f"{where} has {len(ids)} tokens, more than the limit of {limit}"
            raise ConfigError("sft.overlong", "refuse", rule, "drop or truncate, or a larger sft.max_length")
        if config.sft.overlong == "drop":
            counts.overlong_dropped += 1
            return None
        counts.truncated += 1
        counts.tokens_truncated += len(ids) - limit
        ids, mask = ids[:limit], mask[:limit]
    if not any(mask):
        counts.without_loss_tokens += 1
        return None
    return SftRow(row_id, ids, mask, tokens.text)


_SAID = {
    "mismatched": "rows dropped because a turn's context is tokenised differently on its own (sft.mismatched)",
    "split": "conversations split into one row per assistant turn (sft.mismatched)",
    "overlong_dropped": "rows dropped above {limit} tokens (sft.overlong)",
    "truncated": "rows cut at {limit} tokens (sft.overlong)",
    "without_loss_tokens": "rows dropped without a token to learn",
    "without_end_token": "rows with an assistant turn that no end token closes: the model does not learn to stop there",
    "duplicates": "training rows left out because a held-out or shown row asks the same",
}


def _sentence(counts: RowCounts, limit: int | None) -> str:
    """What was left out or changed, as one sentence; empty when nothing was."""
    parts = [
        f"{value} {_SAID[counter.name].format(limit=limit)}"
        for counter in fields(counts)
        if counter.name in _SAID and (value := getattr(counts, counter.name))
    ]
    return "; ".join(parts)
