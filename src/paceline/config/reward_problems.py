"""What pydantic says of a source in `reward.sources`, in the words of a refusal."""

import difflib

from pydantic_core import ErrorDetails

from paceline.config.errors import ConfigError
from paceline.config.reward_schema import JudgeSource, ModelSource, RemoteSource, RuleSource, SourceSection

KINDS: dict[str, type[SourceSection]] = {
    "rule": RuleSource,
    "model": ModelSource,
    "judge": JudgeSource,
    "remote": RemoteSource,
}


def source_problem(detail: ErrorDetails) -> ConfigError:
    """One problem within a source; `detail["loc"]` is reward, sources, its name, its kind and the setting, the last two
    where there are any."""
    _, _, name, *rest = (str(part) for part in detail["loc"])
    kind, setting = (rest[0], ".".join(rest[1:])) if rest else ("", "kind")
    key = f"reward.sources.{name}" + (f".{setting}" if setting else "")
    value = detail["input"]
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        given = value.get("kind") if isinstance(value, dict) else None
        close = difflib.get_close_matches(str(given), KINDS, n=1, cutoff=0.0)
        rule = f"every source has a kind, one of {', '.join(KINDS)}"
        return ConfigError(
            f"reward.sources.{name}.kind", given, rule, close[0] if given is not None else "rule"
        )
    if detail["type"] == "extra_forbidden":
        close = difflib.get_close_matches(setting, KINDS[kind].model_fields, n=1)
        return ConfigError(
            key, value, f"a source of kind {kind} has no such key", close[0] if close else None
        )
    context = detail.get("ctx", {})
    nearest = None
    if detail["type"] == "literal_error":
        choices = [choice.strip("'") for choice in str(context["expected"]).replace(" or ", ", ").split(", ")]
        nearest = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)[0]
    for bound in ("ge", "le"):
        if bound in context:
            nearest = str(context[bound])
    rule = detail["msg"].replace("Input should be", "must be")
    return ConfigError(key, value, rule[:1].lower() + rule[1:], nearest)
