"""A model by its name: a local folder, a model in the Hub's cache, or one that the Hub can be asked for.

The Hub's client asks again for half a minute where there is no network; a person who mistyped a folder's name waits
for that. One short question before says what was tried.
"""

import ssl
import urllib.request
from difflib import get_close_matches
from pathlib import Path
from urllib.error import HTTPError, URLError

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from paceline.config.errors import ConfigError

_ASK_TIMEOUT_S = 5.0
_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")


def check_can_be_found(path: str, key: str, revision: str | None = None) -> None:
    """Raises `ConfigError`, which says what was tried, where a model or tokenizer can come from nowhere.

    `key` is the setting that the refusal names. Whether the Hub has the model is left to its client.
    """
    if Path(path).is_dir():
        return
    if path.startswith(("/", ".", "~")):
        raise ConfigError(key, path, "there is no such folder", _nearest_folder(path))
    try:
        cached = (try_to_load_from_cache(path, name, revision=revision) for name in _FILES)
        if any(isinstance(found, str) for found in cached):
            return
    except HFValidationError:
        rule = f"there is no such folder in {Path.cwd()}, and no model on the Hub can have this name"
        raise ConfigError(key, path, rule, _nearest_folder(path)) from None
    if (reason := _why_unreachable(constants.ENDPOINT)) is not None:
        rule = (
            f"there is no such folder in {Path.cwd()}, no such model in the Hub's cache ({constants.HF_HUB_CACHE}), "
            f"and {reason}"
        )
        raise ConfigError(key, path, rule, _nearest_folder(path))


def _why_unreachable(endpoint: str) -> str | None:
    """Why the Hub cannot be asked; None where it answers, whatever it says."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if "all" in urllib.request.getproxies():
        return None  # a kind of proxy that only the Hub's client may know
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=_ASK_TIMEOUT_S).close()
    except HTTPError:
        return None
    except URLError as error:
        # the Hub's client has certificates of its own
        return (
            None if isinstance(error.reason, ssl.SSLError) else f"{endpoint} does not answer ({error.reason})"
        )
    except OSError as error:
        return f"{endpoint} does not answer ({error})"
    return None


def _nearest_folder(path: str) -> str | None:
    """A folder beside the one that was meant, with a model or tokenizer in it and a name much like it."""
    wanted = Path(path)
    beside = wanted.expanduser().parent
    if not beside.is_dir():
        return None
    models = [
        one.name for one in beside.iterdir() if one.is_dir() and any((one / name).exists() for name in _FILES)
    ]
    near = get_close_matches(wanted.name, models, n=1)
    return str(wanted.parent / near[0]) if near else None
