"""The chat template that a recipe names."""

from pathlib import Path

from paceline.config.errors import ConfigError


def read_chat_template(path: str, key: str = "model.chat_template") -> str:
    """The template in the file that setting `key` names.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(key, path, f"cannot be read ({error})") from error
