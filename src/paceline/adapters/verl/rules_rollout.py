"""Rules about generation."""

import ast
from collections.abc import Iterator
from pathlib import Path

from paceline.adapters.verl.batch_sizes import batch_sizes
from paceline.adapters.verl.defaults import ROLLOUT
from paceline.adapters.verl.findings import ASCEND, GUIDE, LONG_RUN, Hit, Rule
from paceline.adapters.verl.launch import VerlLaunch


def prefill_takes_many_tokens(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ROLLOUT}.max_num_batched_tokens"
    value = launch.integer(key)
    if value is not None and value <= 2048:
        yield Hit(
            key, value, 8192, "an engine step takes at most so many tokens: prefill comes in small pieces"
        )


def decoding_uses_graphs(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ROLLOUT}.enforce_eager"
    if launch.flag(key):
        why = "every kernel of every decoding step is launched from the host"
        yield Hit(key, True, False, why, "15 to 20 % of the whole step in the report, on Ascend")


def engine_statistics_are_logged(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ROLLOUT}.disable_log_stats"
    if launch.get(key) is True:
        yield Hit(
            key,
            True,
            False,
            "cache use and preemptions are what max_num_seqs and the memory share are set by",
        )


def prompts_are_computed_once(launch: VerlLaunch) -> Iterator[Hit]:
    key, n = f"{ROLLOUT}.enable_prefix_caching", launch.integer(f"{ROLLOUT}.n") or 1
    if launch.get(key) is False and n > 1:
        yield Hit(
            key,
            False,
            True,
            f"the prompt of {n} samples is computed {n} times",
            f"prefill divided by up to {n}",
        )


def samples_run_in_one_wave(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ROLLOUT}.max_num_seqs"
    limit, samples = launch.integer(key), batch_sizes(launch).samples_per_replica
    if limit and samples and samples > limit and not launch.is_separate:
        waves = int(-(-samples // limit))
        why = f"a replica has {samples:.0f} samples and runs {limit}: {waves} waves, each with a tail of its own"
        yield Hit(key, limit, min(1024, int(samples)), f"{why}; raise it if the cache has room")


def chunked_prefill_is_on(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ROLLOUT}.enable_chunked_prefill"
    if launch.get(key) is False:
        yield Hit(key, False, True, "a long prompt holds up every decoding sample of its replica")


def attention_backend_exists_in_v1(launch: VerlLaunch) -> Iterator[Hit]:
    backend = launch.environment.get("VLLM_ATTENTION_BACKEND")
    if backend == "XFORMERS":
        why = (
            "a backend of vLLM's old engine only; the present engine refuses it or falls back to the old one"
        )
        yield Hit("VLLM_ATTENTION_BACKEND", backend, "unset, or FLASH_ATTN", why)


def layout_of_inputs_and_outputs_agrees(launch: VerlLaunch) -> Iterator[Hit]:
    values = {key: o.value for key, o in launch.settings.items() if "interleave" in key.rpartition(".")[2]}
    values |= _repeats_in(launch.folder / launch.entry.split()[0]) if launch.entry else {}
    if len(set(values.values())) > 1:
        shown = ", ".join(f"{key}: {value}" for key, value in values.items())
        why = (
            "samples are laid out one way before generation and another way after it, so that rewards meet the wrong "
            "prompts; the reward falls to 0"
        )
        yield Hit(next(iter(values)), shown, "the same on both sides", why)


def _repeats_in(path: Path) -> dict[str, bool]:
    """`interleave=` of the `.repeat` calls in a trainer of the user's own, by line."""
    if path.suffix != ".py" or not path.is_file():
        return {}
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return {}
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "repeat":
            for keyword in node.keywords:
                if keyword.arg == "interleave" and isinstance(keyword.value, ast.Constant):
                    found[f"{path.name}:{node.lineno}"] = bool(keyword.value.value)
    return found


RULES = (
    Rule("rollout/batched-tokens", "warning", "B11", f"{GUIDE}, rollout", prefill_takes_many_tokens),
    Rule(
        "rollout/eager",
        "warning",
        "B7",
        f"{LONG_RUN}, section 3.2.1; {ASCEND}, graph mode",
        decoding_uses_graphs,
    ),
    Rule("rollout/log-stats", "advice", "B11", f"{GUIDE}, rollout", engine_statistics_are_logged),
    Rule("rollout/prefix-cache", "warning", "B11", "verl rollout config", prompts_are_computed_once),
    Rule("rollout/waves", "advice", "C8", f"{GUIDE}, rollout", samples_run_in_one_wave),
    Rule("rollout/chunked-prefill", "advice", "B11", f"{ASCEND}, chunked prefill", chunked_prefill_is_on),
    Rule("rollout/attention-backend", "warning", "B11", "vLLM V1 engine", attention_backend_exists_in_v1),
    Rule("rollout/interleave", "error", "C8", f"{LONG_RUN}, section 4", layout_of_inputs_and_outputs_agrees),
)
