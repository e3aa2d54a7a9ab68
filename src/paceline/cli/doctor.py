"""`paceline doctor`: what this machine offers a run, and what in it or in the recipe would cost time or fail.

Every check is one function that returns lines of OK, WARN or FAIL, with advice where there is something to do.
No model is loaded; torch is imported to ask it about devices.
"""

import json
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.markup import escape

from paceline.bench.ceilings import write_speed
from paceline.cli.checks import FAIL, OK, WARN, Check, usable_cores
from paceline.cli.doctor_hardware import (
    ceilings_check,
    debug_flags,
    device_use,
    interconnect,
    known_ceilings,
    recipe_cache,
    recipe_telemetry,
)
from paceline.config import Config, ConfigError, batch_arithmetic, decide_old_logprob, load_config
from paceline.config.rewards import rule_names
from paceline.config.sft import is_sft
from paceline.model.flash_kernels import kernel_for
from paceline.rewards.functions import resolve
from paceline.types import RewardSpec

_GIB = 2**30
_LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "pydantic",
    "numpy",
    "pyarrow",
    "reasoning-gym",
)
_PROBE_BYTES = 32 * 2**20
_STEPS_TO_LOSE = 50


def examine(recipe: str | None, overrides: Sequence[str], measure: bool = False) -> list[Check]:
    """All checks of this machine, then those of the recipe (or of `overrides` alone) if one is given.

    `measure` finds the machine's ceilings first and keeps them; that takes tens of seconds.
    """
    checks = [*versions(), cpu(), threads(), memory(), *devices(), *device_use()]
    checks += [attention(), tokenizers_parallelism(), *debug_flags()]
    config: Config | None = None
    recipe_checks: list[Check] = []
    if recipe is not None or overrides:
        try:
            config = load_config(recipe, overrides)
        except ConfigError as error:
            recipe_checks = [Check(one.key, FAIL, one.line, one.nearest or "") for one in error.problems]
        else:
            looks = SFT_CHECKS if is_sft(config) else RECIPE_CHECKS
            recipe_checks = [check for look in looks for check in look(config)]
    folder = Path(config.run.dir if config is not None else "runs")
    ceilings = known_ceilings(config, folder, measure)
    num_devices = 1 if config is None else config.cluster.num_devices
    checks += [ceilings_check(ceilings), *interconnect(ceilings, num_devices)]
    return [*checks, *disk(folder), weights_cache(), *recipe_checks]


def print_checks(checks: Sequence[Check]) -> None:
    """The lines for people; advice stands indented below its line."""
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(check.name) for check in checks)
    colours = {OK: "green", WARN: "yellow", FAIL: "red"}
    for check in checks:
        mark = f"[{colours[check.status]}]{check.status:<4}[/]"
        console.print(f"{mark}  {check.name:<{width}}  {escape(check.found)}")
        if check.advice:
            console.print(f"{'':<{width + 8}}-> {escape(check.advice)}")
    counts = {status: sum(check.status == status for check in checks) for status in (OK, WARN, FAIL)}
    console.print(f"\n{counts[OK]} OK, {counts[WARN]} WARN, {counts[FAIL]} FAIL")


def versions() -> list[Check]:
    """Python and the libraries a run uses, against what paceline is known to work with."""
    checks = [Check("python", OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    wanted = _required_versions()
    for library in _LIBRARIES:
        try:
            version = metadata.version(library)
        except metadata.PackageNotFoundError:
            checks.append(Check(library, FAIL, "not installed", f"pip install {library}"))
            continue
        if library in wanted and not wanted[library].contains(version, prereleases=True):
            advice = f"pip install '{library}{wanted[library]}'"
            checks.append(Check(library, WARN, f"{version}, outside {wanted[library]}", advice))
        else:
            checks.append(Check(library, OK, version))
    return checks


def _required_versions() -> dict[str, SpecifierSet]:
    """What the installed package requires, by library; empty where it is not installed but run from its source."""
    try:
        texts = metadata.requires("paceline") or []
    except metadata.PackageNotFoundError:
        return {}
    return {found.name: found.specifier for found in map(Requirement, texts) if found.specifier}


def cpu() -> Check:
    """Cores this process may use and the bfloat16 instructions torch sees."""
    usable, physical = usable_cores(), psutil.cpu_count(logical=False) or 0
    amx, avx512 = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_bf16_supported()
    units = "AMX bfloat16 tiles" if amx else "AVX512 bfloat16" if avx512 else "no bfloat16 units"
    found = f"{usable} usable cores, {physical} physical on the machine; {units}"
    advice = "model.dtype: native computes in bfloat16 here" if amx else ""
    return Check("cpu", OK, found, advice)


def threads() -> Check:
    """Threads of torch's operators against the cores there are."""
    usable, used = usable_cores(), torch.get_num_threads()
    setting = os.environ.get("OMP_NUM_THREADS")
    found = f"torch uses {used} of {usable} cores; OMP_NUM_THREADS is {setting or 'not set'}"
    if used > usable:
        return Check(
            "threads", WARN, found, f"more threads than cores slow each other: cluster.num_threads={usable}"
        )
    if used == 1 and usable > 2:
        return Check(
            "threads",
            WARN,
            found,
            f"most cores stay idle: unset OMP_NUM_THREADS or cluster.num_threads={usable}",
        )
    return Check("threads", OK, found)


def memory() -> Check:
    """Host memory that is free now, within the container's limit where there is one."""
    state = psutil.virtual_memory()
    limit = _container_limit()
    available, total = min(state.available, limit), min(state.total, limit)
    found = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB available"
    if available < 3 * _GIB:
        return Check(
            "memory", WARN, found, "the demo needs about 3 GiB: end other programs or use a smaller model"
        )
    return Check("memory", OK, found)


def _container_limit() -> float:
    """Bytes a version 2 control group allows this process, infinity without such a limit."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return float("inf") if text == "max" else float(text)


def devices() -> list[Check]:
    """CUDA devices that torch can use."""
    if not torch.cuda.is_available():
        built = (
            f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        )
        return [Check("cuda", OK, f"no device ({built}); training runs on the CPU")]
    checks = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found = (
            f"{properties.name}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free, CUDA {torch.version.cuda}"
        )
        busy = free < total / 2
        advice = "another process holds more than half of its memory" if busy else ""
        checks.append(Check(f"cuda:{index}", WARN if busy else OK, found, advice))
    return checks


def attention() -> Check:
    """The attention kernel packed training uses here."""
    if not torch.cuda.is_available():
        return Check("attention", OK, "packed attention on the CPU, sequence by sequence")
    kernel = kernel_for(torch.device("cuda"))
    if kernel is not None:
        return Check("attention", OK, f"variable-length kernel: {kernel.name}")
    major, minor = torch.cuda.get_device_capability()
    advice = "the kernel needs compute capability 8.0; training is exact but slower here"
    return Check("attention", WARN, f"sequence by sequence: compute capability is {major}.{minor}", advice)


def tokenizers_parallelism() -> Check:
    """Whether the tokenizer library will print fork warnings or run serially."""
    setting = os.environ.get("TOKENIZERS_PARALLELISM")
    if setting is not None and setting.lower() in ("false", "0", "off", "no"):
        advice = "large prompt files tokenise on one core: unset TOKENIZERS_PARALLELISM"
        return Check("tokenizers", WARN, f"TOKENIZERS_PARALLELISM is {setting}", advice)
    return Check("tokenizers", OK, f"TOKENIZERS_PARALLELISM is {setting or 'not set'}: parallel")


def disk(folder: Path) -> list[Check]:
    """Free space and measured write speed where the run's folder would be."""
    existing = folder.absolute()
    while not existing.is_dir():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    space = Check("disk space", OK, f"{free / _GIB:.1f} GiB free for {folder}")
    if free < 5 * _GIB:
        advice = "a checkpoint holds weights, masters and moments: free some space or set run.dir"
        space = Check("disk space", WARN, space.found, advice)
    try:
        speed = write_speed(existing, _PROBE_BYTES)
    except OSError as error:
        return [
            space,
            Check(
                "disk speed",
                FAIL,
                f"cannot write below {existing}: {error}",
                "set run.dir to a writable folder",
            ),
        ]
    found = f"{speed / 2**20:.0f} MiB/s written and synced"
    if speed < 50 * 2**20:
        return [
            space,
            Check("disk speed", WARN, found, "checkpoints will be slow: set run.dir to a local disk"),
        ]
    return [space, Check("disk speed", OK, found)]


def weights_cache() -> Check:
    """Whether the demo's weights, and any Hugging Face weights, are on this machine already."""
    own = Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache/paceline").expanduser()
    hub = Path(
        os.environ.get("HF_HUB_CACHE")
        or Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface") / "hub"
    )
    demo = any(own.glob("*/config.json"))
    num_models = len(list(hub.glob("models--*"))) if hub.is_dir() else 0
    found = f"demo weights {'present' if demo else 'not fetched yet'}; {num_models} models in the Hugging Face cache"
    return Check("weights cache", OK, found, "" if demo else "make demo fetches them once")


def recipe_sizes(config: Config) -> list[Check]:
    """The recipe is valid; its main sizes."""
    if is_sft(config):
        rows, epochs = config.batch.num_prompts, config.sft.num_epochs
        found = f"valid: supervised, {rows} rows per update, {epochs} epochs"
        return [Check("recipe", OK, found, "paceline sft RECIPE --dry-run counts the rows and updates")]
    sizes, decision = batch_arithmetic(config), decide_old_logprob(config)
    found = (
        f"valid: {sizes.samples_per_step} samples and {sizes.updates_per_step} updates per step, "
        f"{sizes.total_updates} updates in all; old log-probs: {decision.source}"
    )
    return [Check("recipe", OK, found, "paceline train RECIPE --dry-run prints the whole arithmetic")]


def recipe_model(config: Config) -> list[Check]:
    """Where the model would come from."""
    path = config.model.path
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            return [
                Check("model.path", FAIL, f"{path} has no config.json", "name a Hugging Face model folder")
            ]
        stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return [Check("model.path", OK, f"local folder, {stated.get('model_type', 'type not stated')}")]
    if path.startswith(("/", "./", "../", "~")) or path.count("/") > 1:
        return [
            Check(
                "model.path", FAIL, f"{path} is not a folder", "paths are relative to the working directory"
            )
        ]
    return [Check("model.path", OK, f"{path} from the Hugging Face hub or its cache")]


def recipe_files(config: Config) -> list[Check]:
    """The files a recipe names exist."""
    named = {
        "task.path": config.task.path,
        "task.eval_path": config.task.eval_path,
        "model.chat_template": config.model.chat_template,
    }
    return [
        Check(key, FAIL, f"{path} does not exist", "paths are relative to the working directory")
        for key, path in named.items()
        if path is not None and not Path(path).expanduser().exists()
    ]


def recipe_reward(config: Config) -> list[Check]:
    """The reward functions of one's own that a recipe names can be imported from here."""
    checks = []
    for source, name in rule_names(config, config.task.reward).items():
        if ":" not in name:
            continue
        key = "task.reward" if name == config.task.reward else f"reward.sources.{source}.name"
        try:
            resolve(RewardSpec(name))
        except ConfigError as error:
            checks.append(Check(key, FAIL, f"{name}: {error.rule}", error.nearest or ""))
        else:
            checks.append(Check(key, OK, f"{name} can be imported"))
    return checks


def recipe_device(config: Config) -> list[Check]:
    """The device asked for is there."""
    if config.cluster.device == "cuda" and not torch.cuda.is_available():
        return [Check("cluster.device", FAIL, "cuda is asked for and torch shows no device", "cpu or auto")]
    return []


def recipe_workers(config: Config) -> list[Check]:
    """Reward workers against the cores there are."""
    wanted, cores = config.task.reward_workers, usable_cores()
    found = f"{wanted} processes on {cores} cores"
    if wanted > cores:
        advice = f"scoring would take cores from the CPU's own work: task.reward_workers={cores}"
        return [Check("task.reward_workers", WARN, found, advice)]
    return [Check("task.reward_workers", OK, found)]


def recipe_checkpoints(config: Config) -> list[Check]:
    """How much a crash would cost, and how much saving does."""
    checkpoint, num_steps = config.checkpoint, config.run.num_steps
    found = f"every {checkpoint.every} steps, {checkpoint.keep} kept"
    if checkpoint.every == 0 and num_steps > _STEPS_TO_LOSE:
        advice = f"a crash loses up to {num_steps} steps: checkpoint.every={max(10, num_steps // 10)}"
        return [Check("checkpoint.every", WARN, "0: only at the end, or when asked to stop", advice)]
    if checkpoint.every > num_steps:
        return [
            Check(
                "checkpoint.every", WARN, f"{found}; the run has {num_steps}", "nothing is saved on the way"
            )
        ]
    if 0 < checkpoint.every < 5 and not checkpoint.asynchronous:
        return [Check("checkpoint.every", WARN, found, "each save blocks: checkpoint.asynchronous=true")]
    return [Check("checkpoint.every", OK, found)]


def recipe_records(config: Config) -> list[Check]:
    """Settings that write or measure often."""
    checks = []
    per_step = config.batch.num_prompts * config.batch.num_samples
    if config.run.save_samples_every == 1 and config.run.num_steps * per_step > 1_000_000:
        found = f"{config.run.num_steps * per_step:,} samples would be written"
        checks.append(Check("run.save_samples_every", WARN, found, "run.save_samples_every=10 keeps a tenth"))
    if 0 < config.run.eval_every < 5:
        advice = "evaluations take rollout time: a larger run.eval_every trains more"
        checks.append(Check("run.eval_every", WARN, f"every {config.run.eval_every} steps", advice))
    return checks


RECIPE_CHECKS: tuple[Callable[[Config], list[Check]], ...] = (
    recipe_sizes,
    recipe_model,
    recipe_files,
    recipe_reward,
    recipe_device,
    recipe_workers,
    recipe_checkpoints,
    recipe_records,
    recipe_telemetry,
    recipe_cache,
)

SFT_CHECKS = (recipe_sizes, recipe_model, recipe_files, recipe_device, recipe_telemetry)
"""Those that mean something to a supervised recipe: it has neither rewards nor a number of steps yet."""
