"""The feature map: what each feature of the product reduces, risks and needs, and the settings that switch it on.

The records are data (`features.yaml`); more of them can be read from a file of one's own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import ConfigError
from paceline.config.yaml_scalars import parse_yaml
from paceline.diagnosis.catalog import FINDINGS
from paceline.types import CAUSES, STAGES, Cause

Shares = tuple[float, float, float]
"""Least, expected and greatest share of a cost's seconds that a feature removes."""

TOLERANCES = ("loss", "grad_norm", "loss_16bit", "grad_norm_16bit")

_TEXTS = ("title", "effect", "risk", "prerequisite")


@dataclass(frozen=True, slots=True)
class Feature:
    """One record; see the head of `features.yaml`. Texts are by language."""

    id: str
    reduces: tuple[Cause, ...]
    helps: Mapping[str, Shares]
    cells: Mapping[tuple[str, str], Shares]
    requires: Mapping[str, tuple[Any, ...]]
    keys: Mapping[str, Any]
    title: Mapping[str, str]
    effect: Mapping[str, str]
    risk: Mapping[str, str]
    prerequisite: Mapping[str, str]
    tolerance: Mapping[str, float] = field(default_factory=dict)
    changes_training: bool = False


def read_features(path: Path) -> dict[str, Feature]:
    """The records of a file by id.

    Raises:
        ConfigError: there is no such file, or a record lacks a part or names a finding, stage or cause that does not
            exist.
    """
    if not path.is_file():
        raise ConfigError("--features", str(path), "there is no such file", zh="没有这个文件")
    content = parse_yaml(path.read_text(encoding="utf-8"))
    if not isinstance(content, Mapping):
        raise ConfigError(
            "--features",
            str(path),
            "must be a mapping of feature ids to records",
            zh="须是特性标识到记录的映射",
        )
    return {str(id): _feature(str(id), record) for id, record in content.items()}


def _feature(id: str, record: Any) -> Feature:
    wanted = {"reduces", "helps", "keys", *_TEXTS}
    if not isinstance(record, Mapping) or (missing := wanted - record.keys()):
        lacking = ", ".join(sorted(missing)) if isinstance(record, Mapping) else "everything"
        raise ConfigError(f"features.{id}", None, f"the record lacks {lacking}", zh=f"记录缺少 {lacking}")
    if unknown := sorted(set(record["helps"]) - FINDINGS.keys()):
        raise _not_among(f"features.{id}.helps", unknown[0], FINDINGS)
    reduces = tuple(cause for cause in CAUSES if cause in record["reduces"])
    if len(reduces) != len(record["reduces"]):
        raise _not_among(f"features.{id}.reduces", record["reduces"], CAUSES)
    return Feature(
        id=id,
        reduces=reduces,
        helps={name: _shares(id, shares) for name, shares in record["helps"].items()},
        cells={_cell(id, name): _shares(id, shares) for name, shares in record.get("cells", {}).items()},
        requires={key: tuple(values) for key, values in record.get("requires", {}).items()},
        keys=dict(record["keys"]),
        title=record["title"],
        effect=record["effect"],
        risk=record["risk"],
        prerequisite=record["prerequisite"],
        tolerance=_tolerance(id, record.get("tolerance", {})),
        changes_training=_yes_or_no(id, "changes_training", record.get("changes_training", False)),
    )


def _tolerance(id: str, content: Any) -> dict[str, float]:
    if not isinstance(content, Mapping) or not all(
        name in TOLERANCES and isinstance(value, int | float) and value >= 0
        for name, value in content.items()
    ):
        rule, zh = "may state loss and grad_norm, each at least 0", "可写 loss 与 grad_norm，均不小于 0"
        raise ConfigError(f"features.{id}.tolerance", content, rule, zh=zh)
    return {name: float(value) for name, value in content.items()}


def _yes_or_no(id: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"features.{id}.{name}", value, "must be true or false", zh="须是 true 或 false")
    return value


def _shares(id: str, shares: Any) -> Shares:
    if not isinstance(shares, list) or len(shares) != 3 or not 0 <= shares[0] <= shares[1] <= shares[2] <= 1:
        rule, zh = "must be three rising shares between 0 and 1", "须是 0 到 1 之间不减的三个比例"
        raise ConfigError(f"features.{id}", shares, rule, zh=zh)
    return (float(shares[0]), float(shares[1]), float(shares[2]))


def _cell(id: str, name: str) -> tuple[str, str]:
    stage, _, cause = name.partition("/")
    if stage not in STAGES or cause not in CAUSES:
        raise ConfigError(f"features.{id}.cells", name, "must be written stage/cause", zh="须写成 阶段/起因")
    return stage, cause


def _not_among(key: str, value: Any, allowed: Iterable[str]) -> ConfigError:
    names = ", ".join(allowed)
    return ConfigError(key, value, f"must be among {names}", zh=f"须取自 {names}")


FEATURES: dict[str, Feature] = read_features(Path(__file__).parent / "features.yaml")
"""The product's own features by id."""


def add_features(path: Path) -> None:
    """Adds a file's records to the map, replacing those of the same id."""
    FEATURES.update(read_features(path))
