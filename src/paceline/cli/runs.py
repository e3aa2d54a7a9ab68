"""The folder of a run as an argument: refused the same way by every command that reads one."""

from pathlib import Path

from paceline.config import ConfigError


def check_run_folder(run: Path, argument: str = "run") -> None:
    """Raises `ConfigError`, with runs that are near, unless `run` is the folder of a run."""
    if (run / "config.yaml").is_file():
        return
    check_exists(run, argument)
    rule = "must be the folder of a run, which holds a config.yaml"
    zh = "须是训练运行的文件夹，其中有 config.yaml"
    raise ConfigError(argument, str(run), rule, _runs_in(run), zh=zh)


def check_exists(run: Path, argument: str = "run") -> None:
    """Raises `ConfigError`, with runs that are near, unless `run` is a folder."""
    if not run.exists():
        raise ConfigError(
            argument, str(run), "there is no such folder", _runs_in(run.parent), zh="没有这个文件夹"
        )
    if not run.is_dir():
        rule, zh = "must be the folder of a run, and is a file", "须是训练运行的文件夹，而这是一个文件"
        raise ConfigError(argument, str(run), rule, _runs_in(run.parent), zh=zh)


def _runs_in(folder: Path) -> str | None:
    """The last three by name."""
    runs = sorted(path.parent for path in folder.glob("*/config.yaml")) if folder.is_dir() else []
    return ", ".join(str(path) for path in runs[-3:]) or None
