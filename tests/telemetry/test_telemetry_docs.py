"""docs/records.md names every field that is written, and its metric table is the declared one."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

import paceline
from paceline.checkpoint.layout import FileRecord, Manifest
from paceline.telemetry.environment import collect_environment
from paceline.telemetry.metric_schema import with_metric_table
from paceline.telemetry.records import BackgroundRecord, SectionRecord, SpanRecord, StageRecord

SOURCE = Path(paceline.__file__).parent
DOCUMENT = SOURCE.parent.parent / "docs" / "records.md"


@pytest.fixture(scope="module")
def document():
    return DOCUMENT.read_text(encoding="utf-8")


def section(document, title):
    """Text below a second-level heading."""
    return document.split(f"\n## {title}\n")[1].split("\n## ")[0]


def names_in(text):
    """Every name in code font, the parts of a dotted one too."""
    quoted = re.findall(r"`([^`\n]+)`", text)
    return {*quoted, *(part for name in quoted for part in name.split("."))}


def keys_written(module, function):
    """Text keys of the mapping literals in a function, nested ones included."""
    tree = ast.parse((SOURCE / module).read_text(encoding="utf-8"))
    (found,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function)
    mappings = [node for node in ast.walk(found) if isinstance(node, ast.Dict)]
    return {key.value for mapping in mappings for key in mapping.keys if isinstance(key, ast.Constant)}


def test_the_metric_table_is_the_declared_one(document):
    assert with_metric_table(document) == document, (
        "run: python -m paceline.telemetry.metric_schema docs/records.md"
    )


@pytest.mark.parametrize("record", [SectionRecord, StageRecord, SpanRecord, BackgroundRecord])
def test_every_field_of_the_ledger_is_documented(document, record):
    names = names_in(section(document, "ledger/rank{r}.jsonl"))
    assert {field.name for field in fields(record)} <= names


def test_every_field_of_the_environment_is_documented(document):
    names = names_in(section(document, "env.json"))
    environment = collect_environment({})
    assert set(environment) <= names
    assert set(environment["cpu"]) <= names
    features = {
        "packed_attention",
        "fused_layers",
        "bf16_matrix_units",
        "packing_probe_mean_nats",
        "packing_probe_max_nats",
    }
    assert keys_written("schedules/run_folder.py", "write_environment") - features <= names


def test_every_field_of_a_sample_is_documented(document):
    names = names_in(section(document, "samples/step{n}.jsonl"))
    assert keys_written("schedules/step_metrics.py", "sample_rows") <= names


def test_every_field_of_a_checkpoint_is_documented(document):
    names = names_in(section(document, "checkpoints/step_{n}/"))
    assert keys_written("schedules/saving.py", "save") - {"masters", "moments"} <= names
    assert {field.name for record in (Manifest, FileRecord) for field in fields(record)} <= names


def test_every_field_of_the_summary_is_documented(document):
    names = names_in(section(document, "summary.json"))
    assert keys_written("schedules/recorder.py", "summary") <= names


def test_every_stage_has_its_row_in_the_metric_table(document):
    assert "| `time/update_actor` | mean | s |" in document
