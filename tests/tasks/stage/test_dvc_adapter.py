"""DVC's own packages: in one module, which no stage imports, and only of the versions that have the names it uses."""

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlhf_core.errors import UserError
from tasks.params.loader import parse_yaml, read_yaml
from tasks.stage.dvc_adapter import apply_overrides, overridden

ROOT = Path(__file__).resolve().parents[3]


def test_dvc_is_imported_in_one_module_only() -> None:
    files = [path for folder in ("tasks", "flows") for path in (ROOT / folder).rglob("*.py")]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith(("from dvc", "import dvc"))
    }
    assert found == {"tasks/stage/dvc_adapter.py"}


def test_the_pin_allows_the_installed_version_and_no_later_minor() -> None:
    """Minor versions of DVC rename what the adapter uses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = {one.name: one.specifier for one in map(Requirement, project["dependencies"])}
    for name in ("dvc", "dvc-data"):
        major, minor = map(int, version(name).split(".")[:2])
        assert pins[name].contains(version(name))
        assert not pins[name].contains(f"{major}.{minor + 1}.0")


def test_a_stage_runs_without_dvc(tmp_path: Path) -> None:
    """What a stage imports, where DVC is not installed or of another version."""
    code = "import sys; sys.modules['dvc'] = None; import tasks.stage.run, tasks.records.recorded, flows.graph"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


OVERRIDES = ("~select", "++select={}", "sft.epochs=2", "evaluate.seeds=[1,2]", "++dpo.enabled=false", "seed=3")


def test_overrides_of_the_content_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_bytes((ROOT / "examples/demo.yaml").read_bytes())
    content = read_yaml(tmp_path / "params.yaml")
    apply_overrides(tmp_path, OVERRIDES)
    changed = overridden(content, OVERRIDES)
    assert changed == read_yaml(tmp_path / "params.yaml")
    assert (changed["select"], changed["sft"]["epochs"], changed["seed"]) == ({}, 2, 3)
    assert overridden(content, ()) == content


def test_the_override_that_fails_is_named_and_a_date_is_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^-S b=\[1: "):
        overridden({"a": 1}, ("a=2", "b=[1", "c=3"))
    assert overridden(parse_yaml("seed: 2026-11-28", Path("params.yaml")), ("a=1",))["seed"] == "2026-11-28"
