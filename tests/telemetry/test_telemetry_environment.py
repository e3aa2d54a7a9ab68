"""env.json says what a run ran on, and nothing it should not."""

import json
import subprocess
from importlib.metadata import version

import pytest

from paceline.telemetry.environment import collect_environment, source_revision, write_environment


def test_the_environment_names_versions_machine_and_what_the_caller_detected(tmp_path):
    extra = {"device": "cpu", "features": {"packed_attention": "varlen"}}
    read = json.loads(write_environment(tmp_path, collect_environment(extra)).read_text())
    assert read["v"] == 1
    assert read["packages"]["torch"] == version("torch")
    assert read["cpu"]["memory_bytes"] > 2**28
    assert 1 <= read["cpu"]["num_usable_cores"] <= read["cpu"]["num_cores"]
    assert read["features"] == {"packed_attention": "varlen"}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_package_that_is_not_installed_is_left_out():
    assert None not in collect_environment({})["packages"].values()


def test_no_variable_beyond_the_named_ones_is_recorded(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setenv("WANDB_API_KEY", "a secret")
    environment = collect_environment({})
    assert environment["variables"]["OMP_NUM_THREADS"] == "1"
    assert "a secret" not in json.dumps(environment)


def test_an_extra_entry_must_not_replace_a_collected_one():
    with pytest.raises(ValueError, match="packages"):
        collect_environment({"packages": {}})


def git(folder, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "module.py").write_text("")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    return package


def test_the_revision_is_that_of_the_checkout_and_says_when_files_differ_from_it(checkout):
    clean = source_revision(checkout)
    assert clean is not None
    assert len(clean["revision"]) == 40 and clean["dirty"] is False
    (checkout / "module.py").write_text("changed = True\n")
    assert source_revision(checkout) == {"revision": clean["revision"], "dirty": True}


def test_a_package_installed_inside_another_projects_checkout_has_no_revision(checkout):
    installed = checkout.parent.parent / ".venv" / "package"
    installed.mkdir(parents=True)
    assert source_revision(installed) is None


def test_a_package_outside_any_checkout_has_no_revision(tmp_path):
    assert source_revision(tmp_path) is None
