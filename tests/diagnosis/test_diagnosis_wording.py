"""Every id has words in every language, and every setting and finding that is named exists."""

import string
from pathlib import Path

import pytest

from paceline.config import ConfigError
from paceline.config.names import FIELDS
from paceline.diagnosis import Evidence, Finding, Switch, Wait
from paceline.diagnosis.catalog import FINDINGS
from paceline.diagnosis.features import FEATURES, read_features
from paceline.diagnosis.results import UNKNOWN_VALUE
from paceline.diagnosis.wording import (
    LANGUAGES,
    cause_name,
    checked_language,
    note,
    prerequisite,
    risk,
    sentence,
    singular,
    stage_name,
    texts,
)
from paceline.types import CAUSES, STAGES


def fields_of(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_languages_have_the_same_ids_and_every_finding_has_a_sentence():
    english = texts("en")
    for lang in LANGUAGES:
        assert {section: set(named) for section, named in texts(lang).items()} == {
            section: set(named) for section, named in english.items()
        }
        assert set(texts(lang)["findings"]) == set(FINDINGS)
        assert all(stage_name(stage, lang) for stage in (*STAGES, "setup", "unaccounted"))
        assert all(cause_name(cause, lang) for cause in CAUSES)


def test_a_sentence_says_the_same_numbers_in_every_language():
    for section in ("findings", "findings_partly_known"):
        for id, text in texts("en")[section].items():
            assert fields_of(texts("zh")[section][id]) == fields_of(text), id


def test_what_a_record_does_not_hold_is_left_out_of_a_sentence():
    values = {"running": UNKNOWN_VALUE, "slots": UNKNOWN_VALUE, "ratio": 2.5}
    found = Finding("long_tail", "rollout", "queue", 1.5, 1.0, 2.0, values)
    for lang in LANGUAGES:
        assert "?" not in sentence(found, lang) and "2.5" in sentence(found, lang)
    missing_ones = {"slow_reward": "per_sample", "slow_disk": "bandwidth", "long_tail": "running"}
    assert missing_ones.keys() == texts("en")["findings_partly_known"].keys()
    for id, name in missing_ones.items():
        assert name in fields_of(texts("en")["findings"][id])
        assert name not in fields_of(texts("en")["findings_partly_known"][id])


def test_every_setting_that_the_feature_map_names_exists():
    for feature in FEATURES.values():
        assert feature.keys
        for name in (*feature.keys, *feature.requires):
            section, _, key = name.partition(".")
            assert key in FIELDS.get(section, {}), f"{feature.id}: {name}"


def test_every_feature_has_all_its_texts_in_every_language_and_something_it_helps_with():
    for feature in FEATURES.values():
        for text in (feature.title, feature.effect, feature.risk, feature.prerequisite):
            assert set(text) == set(LANGUAGES) and all(text.values()), feature.id
        assert feature.helps or feature.cells, feature.id


def test_what_changes_training_states_no_tolerance_for_what_it_changes():
    assert not [one.id for one in FEATURES.values() if one.changes_training and one.tolerance]


def test_numbers_and_switches_are_worded():
    switch = Switch("async_checkpoint", "slow_disk", "queue", 0.4, 0.2, 0.41, "", "")
    for lang in LANGUAGES:
        assert "400 ms" in sentence(switch, lang) and risk(switch, lang) and prerequisite(switch, lang)
        assert "12.5 %" in sentence(Evidence("share", 0.125, "share"), lang)
        assert "1.5 s" in sentence(Wait("reward", "reward", 1.5, 1.4, 1.6, 0.2), lang)
        assert "rank 3" in sentence(
            Finding("slow_rank", "idle", "queue", 1.0, 0.9, 1.1, {"rank": "rank 3", "where": "rollout"}), lang
        )
        assert note("a sentence of an importer", lang) == "a sentence of an importer"


def test_what_there_is_one_of_is_no_plural():
    assert singular("mean of 1 steps on 1 processes") == "mean of 1 step on 1 process"
    assert singular("0.1 steps, 11 steps, 2,1 steps") == "0.1 steps, 11 steps, 2,1 steps"


def test_an_unknown_language_is_refused_by_name():
    with pytest.raises(ConfigError, match="en, zh"):
        checked_language("fr")


def test_a_record_of_ones_own_is_read_and_a_wrong_one_is_refused_with_its_reason(tmp_path: Path):
    record = (
        "mine:\n  reduces: [queue]\n  helps: {slow_disk: [0, 0.5, 1]}\n  keys: {checkpoint.keep: 1}\n"
        + "".join(f"  {name}: {{en: a, zh: b}}\n" for name in ("title", "effect", "risk", "prerequisite"))
    )
    path = tmp_path / "features.yaml"
    path.write_text(record)
    assert read_features(path)["mine"].helps == {"slow_disk": (0.0, 0.5, 1.0)}
    for wrong, right in (("slow_disc", "slow_disk"), ("[0, 0.5, 2]", "[0, 0.5, 1]"), ("[quest]", "[queue]")):
        path.write_text(record.replace(right, wrong))
        with pytest.raises(ConfigError):
            read_features(path)
