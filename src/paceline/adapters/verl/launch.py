"""A verl launch: its entry point, settings with verl's defaults behind them, environment, and what stayed unknown."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.adapters.shell import Command, ShellSyntaxError, read_script
from paceline.adapters.verl.defaults import ACTOR, ALIASES, DEFAULTS, MODEL, REF, ROOTS, SameAs
from paceline.adapters.verl.models import KnownModel, known_model
from paceline.adapters.verl.overrides import Override, parse_override
from paceline.config.errors import ConfigError

_ENVIRONMENT_KEY = re.compile(r"\benv_vars\.([A-Za-z_]\w*)$")
_MIN_OVERRIDES = 2
_OTHER_ENTRY = re.compile(r"sft|main_generation|main_eval|model_merger|rm_trainer", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class VerlLaunch:
    """`settings` holds the last override of each key, `stray` commands made of overrides that reach no launch."""

    entry: str
    overrides: tuple[Override, ...]
    environment: Mapping[str, str]
    line: int
    stray: tuple[Command, ...] = ()
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    folder: Path = Path()
    settings: Mapping[str, Override] = field(init=False)

    def __post_init__(self) -> None:
        settings = {o.key: o for o in self.overrides if o.prefix != "~"}
        for deleted in (o.key for o in self.overrides if o.prefix == "~"):
            settings.pop(deleted, None)
        object.__setattr__(self, "settings", settings)

    def find(self, key: str) -> Override | None:
        """The override that sets `key`, under whichever of its names."""
        names = (*ALIASES.get(key, ()), key)
        return next((self.settings[name] for name in names if name in self.settings), None)

    def is_set(self, key: str) -> bool:
        """Whether the launch itself sets it."""
        return self.find(key) is not None

    def get(self, key: str) -> Any:
        """The value in force: the launch's, else verl's default; None when neither is known."""
        override = self.find(key)
        if override is not None and not (isinstance(override.value, str) and "${" in override.value):
            return override.value
        if override is not None:
            return _interpolated(self, override.value)
        default = DEFAULTS.get(key)
        return self.get(default.key) if isinstance(default, SameAs) else default

    def number(self, key: str) -> float | None:
        """The value when it is a number."""
        value = self.get(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def integer(self, key: str) -> int | None:
        """The value when it is a whole number."""
        value = self.number(key)
        return int(value) if value is not None and value == int(value) else None

    def flag(self, key: str) -> bool:
        """The value when it is a truth value, else False."""
        return self.get(key) is True

    @property
    def uses_megatron(self) -> bool:
        """Whether the actor trains on Megatron."""
        named = "megatron" in self.entry or "megatron" in str(self.get("model_engine"))
        return named or self.get(f"{ACTOR}.strategy") == "megatron"

    @property
    def uses_critic(self) -> bool:
        """Whether a critic is trained."""
        enabled = self.get("critic.enable")
        return enabled if isinstance(enabled, bool) else self.get("algorithm.adv_estimator") == "gae"

    @property
    def uses_reference(self) -> bool:
        """Whether reference log-probs are computed."""
        return self.flag(f"{ACTOR}.use_kl_loss") or self.flag("algorithm.use_kl_in_reward")

    @property
    def is_ascend(self) -> bool:
        """Whether it runs on Ascend NPUs: it says so, or it sets what only they have."""
        if self.get("trainer.device") == "npu" or self.environment.get("DEVICE") == "npu":
            return True
        return any(
            name in self.environment
            for name in ("TASK_QUEUE_ENABLE", "HCCL_CONNECT_TIMEOUT", "ASCEND_HOME_PATH")
        )

    @property
    def is_v1(self) -> bool:
        """Whether the V1 trainer runs."""
        return self.get("trainer.use_v1") is not False

    @property
    def is_separate(self) -> bool:
        """Whether rollout and training have devices of their own."""
        mode = str(self.get("trainer.v1.trainer_mode"))
        return "separate" in mode or any(part in self.entry for part in ("one_step_off", "fully_async"))

    @property
    def model(self) -> KnownModel | None:
        """The actor's shape, when its name or folder says it."""
        path = self.get(f"{MODEL}.path")
        return known_model(path) if isinstance(path, str) else None

    @property
    def num_devices(self) -> int | None:
        """Devices in all."""
        nodes, per_node = self.integer("trainer.nnodes"), self.integer("trainer.n_gpus_per_node")
        return None if nodes is None or per_node is None else nodes * per_node

    @property
    def sequence_parallel(self) -> int:
        """Devices that share one sequence in training: Ulysses on FSDP, context parallel on Megatron."""
        key = "megatron.context_parallel_size" if self.uses_megatron else "ulysses_sequence_parallel_size"
        return self.integer(f"{ACTOR}.{key}") or 1

    @property
    def reference_sequence_parallel(self) -> int:
        """The same for the reference model."""
        key = "megatron.context_parallel_size" if self.uses_megatron else "ulysses_sequence_parallel_size"
        return self.integer(f"{REF}.{key}") or 1

    @property
    def longest(self) -> int | None:
        """Longest prompt plus response in tokens."""
        prompt, response = self.integer("data.max_prompt_length"), self.integer("data.max_response_length")
        return None if prompt is None or response is None else prompt + response


def _interpolated(launch: VerlLaunch, text: str) -> Any:
    match = re.fullmatch(r"\$\{([A-Za-z_][\w.]*\.[\w.]+)\}", text)
    return launch.get(match.group(1)) if match and match.group(1) in {*launch.settings, *DEFAULTS} else text


def read_launch(
    source: str | Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[VerlLaunch, ...]:
    """The verl launches in a script's path, a command as one text, or a command's arguments.

    Raises:
        ConfigError: the file cannot be read, is no shell script, or starts no verl training.
    """
    text, folder, arguments = _source(source)
    shown = text.strip().splitlines()[0][:80] if text.strip() else ""
    try:
        result = read_script(text, environment)
    except ShellSyntaxError as error:
        raise ConfigError("launch", shown, f"is not a shell script that can be read: {error}") from error
    commands = [_unwrapped(command) for command in result.commands]
    if arguments is not None:
        commands = [Command(tuple(arguments), dict(environment or {}), 1)]
    found = [
        (command, _strays_after(commands, at)) for at, command in enumerate(commands) if _is_launch(command)
    ]
    launches = [(command, stray) for command, stray in found if _trains_by_rl(command)]
    if not launches:
        rule = "starts no verl training: it has no command with verl's settings (data.train_files=...)"
        if found:
            rule = f"starts {_entry(found[0][0])}; only verl's reinforcement-learning trainers are read"
        raise ConfigError("launch", shown, rule, "a script or command with python3 -m verl.trainer.main_ppo")
    return tuple(_launch(command, stray, result.notes, result.unknown, folder) for command, stray in launches)


def _strays_after(commands: Sequence[Command], at: int) -> tuple[Command, ...]:
    """Commands made of overrides between the launch at `at` and the next one: what was cut off it."""
    following = commands[at + 1 :]
    end = next((number for number, command in enumerate(following) if _is_launch(command)), len(following))
    return tuple(command for command in following[:end] if _is_stray(command))


def _source(source: str | Sequence[str]) -> tuple[str, Path, list[str] | None]:
    if not isinstance(source, str):
        if len(source) != 1:
            return "", Path(), list(source)
        source = source[0]
    path = Path(source)
    is_name = len(source) < 4096 and "\n" not in source
    if is_name and path.is_file():
        try:
            return path.read_text(encoding="utf-8"), path.parent, None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("launch", source, f"must be a readable script ({error})") from error
    if is_name and " " not in source.strip():
        raise ConfigError("launch", source, "there is no such file, and it is no command")
    return source, Path(), None


def _unwrapped(command: Command) -> Command:
    """The command inside `bash -c "..."`, where that holds a launch."""
    arguments = command.arguments
    for at, argument in enumerate(arguments[:-1]):
        if argument in ("-c", "-lc") and arguments[at - 1].rsplit("/", 1)[-1] in ("bash", "sh"):
            try:
                inner = read_script(arguments[at + 1], command.environment)
            except ShellSyntaxError:
                return command
            found = next((one for one in inner.commands if _is_launch(one)), None)
            return command if found is None else Command(found.arguments, found.environment, command.line)
    return command


def _verl_overrides(arguments: Sequence[str]) -> list[Override]:
    parsed = (parse_override(argument) for argument in arguments)
    return [override for override in parsed if override is not None]


def _has_verl_root(override: Override) -> bool:
    root, _, rest = override.key.partition(".")
    return root in ROOTS and bool(rest)


def _is_launch(command: Command) -> bool:
    arguments = command.arguments
    starts_python = "-m" in arguments or any(argument.endswith(".py") for argument in arguments)
    if not starts_python or _is_cut_off(command):
        return False
    names_verl = any("verl" in argument and parse_override(argument) is None for argument in arguments)
    count = sum(_has_verl_root(override) for override in _verl_overrides(arguments))
    return count >= _MIN_OVERRIDES or (names_verl and count > 0)


def _is_stray(command: Command) -> bool:
    """Whether settings were handed to something that is no launch: a line that begins with one, or `tee`."""
    if _is_cut_off(command):
        return True
    return command.arguments[0] == "tee" and any(map(_has_verl_root, _verl_overrides(command.arguments)))


def _is_cut_off(command: Command) -> bool:
    first = parse_override(command.arguments[0])
    return first is not None and _has_verl_root(first)


def _trains_by_rl(command: Command) -> bool:
    """Whether it starts one of the trainers whose settings the rules are about; SFT and evaluation have others."""
    return _OTHER_ENTRY.search(_entry(command)) is None


def _entry(command: Command) -> str:
    """The module or file that is started."""
    arguments = command.arguments
    if "-m" in arguments[:-1]:
        return arguments[arguments.index("-m") + 1]
    return next((argument for argument in arguments if argument.endswith(".py")), "")


def _launch(
    command: Command, stray: tuple[Command, ...], notes: Sequence[str], unknown: Sequence[str], folder: Path
) -> VerlLaunch:
    arguments = command.arguments
    entry = _entry(command)
    config = next((a for a in arguments if a.startswith("--config-name")), "")
    if config == "--config-name":
        config = arguments[arguments.index(config) + 1] if arguments[-1] != config else ""
    overrides = tuple(_verl_overrides(arguments))
    environment = {**_runtime_environment(arguments, overrides), **command.environment}
    own = [f"{o.key} lists several values; the first is taken" for o in overrides if o.is_sweep]
    own += [f"{argument} is not read" for argument in arguments if argument.startswith("--runtime-env=")]
    name = config.partition("=")[2] or config
    return VerlLaunch(
        entry=f"{entry} {name}".strip(),
        overrides=overrides,
        environment=environment,
        line=command.line,
        stray=stray,
        notes=(*notes, *own),
        unknown=tuple(unknown),
        folder=folder,
    )


def _runtime_environment(arguments: Sequence[str], overrides: Sequence[Override]) -> dict[str, str]:
    """Environment variables handed to Ray's workers."""
    found: dict[str, str] = {}
    for override in overrides:
        if match := _ENVIRONMENT_KEY.search(override.key):
            found[match.group(1)] = str(override.value)
    for argument in arguments:
        if argument.startswith("--runtime-env-json="):
            try:
                content = json.loads(argument.partition("=")[2])
            except ValueError:
                continue
            variables = content.get("env_vars") if isinstance(content, dict) else None
            found |= {str(k): str(v) for k, v in variables.items()} if isinstance(variables, dict) else {}
    return found
