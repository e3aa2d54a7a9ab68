"""Section `reward`: where scores come from when one rule is not all. `docs/rewards.md` shows each kind at work."""

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

Quantization = Literal["none", "int8", "nf4"]


class SourceSection(Section):
    """What every source of a reward has."""

    weight: float = 1.0
    """The reward is the sum of weight x score over all sources."""
    optional: bool = False
    """A sample that this source fails to score keeps the other sources' sum, and the source is left out for all samples
    of its prompt, so that they stay comparable. false: such a sample has no verdict."""


class RuleSource(SourceSection):
    """A function, run in worker processes."""

    kind: Literal["rule"]
    """A function: built in, or `module:function`."""
    name: str | None = None
    """The function; default: task.reward."""


class LoadedSource(SourceSection):
    """A model in this process. It is read only, in the dtype of model.dtype unless told otherwise."""

    path: str = ""
    """Hugging Face id or local folder of the source's model."""
    revision: str | None = None
    """Revision of a Hugging Face id."""
    tokenizer_path: str | None = None
    """Its tokenizer when that is not beside the model."""
    chat_template: str | None = None
    """Path of a Jinja chat template, used in place of its tokenizer's own."""
    dtype: Literal["auto", "native", "float32", "bfloat16"] | None = None
    """Working dtype; default: model.dtype."""
    quantization: Quantization = "none"
    """Linear layers in 8 bits (int8) or 4 (nf4) through bitsandbytes; the head stays as it is. Extra `quantized`."""
    host_between_uses: bool = False
    """Keep the weights on the host while the model is not used; they are moved before and after every batch. Not with
    quantization."""
    trust_remote_code: bool = False
    """Allow the model's repository to run its own Python code."""


class ModelSource(LoadedSource):
    """A reward model: a sequence classifier with one label. It reads the conversation as its own chat template writes
    it, and its score is read at the last token."""

    kind: Literal["model"]
    """A sequence classifier."""
    token_budget: Positive | None = None
    """Strict upper bound on the tokens of one of its micro-batches per device; default: the forward-only budget of the
    actor."""


class JudgeSource(LoadedSource):
    """A language model that is asked for a score and answers in text."""

    kind: Literal["judge"]
    """A language model that writes its verdict."""
    template: str | None = None
    """Path of a Jinja template of the request, with question, completion, answer, prompt, messages and metadata;
    default: one that asks for a last line `Score: N`, N from 0 to 10."""
    score_pattern: str | None = None
    """Regular expression with one group, the score; the last match in the judge's text counts. Default, without
    score_key: `Score:` and a number."""
    score_key: str | None = None
    """Key of a JSON object in the judge's text that holds the score; the last such object counts."""
    lowest: float | None = None
    """Least score the judge may give; a lower one is an error and no score."""
    highest: float | None = None
    """Greatest score the judge may give; a higher one is an error and no score."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 = greedy."""
    max_new_tokens: Positive = 256
    """Longest verdict in tokens."""
    max_running: Positive = 64
    """Verdicts written at the same time (slots of its KV cache)."""


class RemoteSource(SourceSection):
    """A service that is asked over HTTP; docs/rewards.md has the wire format and a server."""

    kind: Literal["remote"]
    """A service over HTTP."""
    url: str = ""
    """Address that batches are posted to; https, or http on this machine."""
    timeout_s: PositiveFloat = 30.0
    """Seconds for one request, connecting and reading included; then its samples count as timeouts."""
    retries: NonNegative = 3
    """Further attempts after a failed connection or a 5xx answer; never after a timeout or a 4xx answer."""
    backoff_s: NonNegativeFloat = 0.5
    """Seconds before the first further attempt; doubled before each one after it."""
    concurrency: Positive = 8
    """Requests under way at the same time."""
    batch_size: Positive = 16
    """Most samples in one request; a request leaves as soon as so many are finished."""
    auth_env: str | None = None
    """Environment variable with the whole value of the header below, such as `Bearer abc`. The value itself stands in
    no file of the run."""
    auth_header: str = "Authorization"
    """Header that carries the value of auth_env."""
    allow_http: bool = False
    """Allow http to another machine: prompts, answers and auth_env's value then cross the network readable."""


AnySource = RuleSource | ModelSource | JudgeSource | RemoteSource


class RewardSection(Section):
    sources: dict[str, Annotated[AnySource, Field(discriminator="kind")]] = Field(default_factory=dict)
    """Sources by a name of your own, each with `kind`: rule, model, judge or remote; their weighted sum is the reward.
    Empty: task.reward alone."""
    sequence_parallel_size: Positive | None = None
    """Ranks that share every conversation of the reward models; default: cluster.sequence_parallel_size."""
