"""DVC's own commands on the real graph: what an edit or a new file makes it run, and what a fresh clone finds."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from tasks import summary
from tests.conftest import Project, call

if TYPE_CHECKING:
    from tests.conftest import TinyRun

ROOT = Path(__file__).resolve().parents[1]
GRAPH: dict[str, Any] = YAML(typ="safe", pure=True).load(ROOT / "dvc.yaml")
STAGES: dict[str, Any] = GRAPH["stages"]
READ_RAW = ["check_data", "ingest"]
SOMEBODY = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")


def stale(project: Project) -> dict[str, list[str]]:
    """Stage -> the dependencies that changed."""
    content = json.loads(project.dvc("status", "--json").stdout)
    return {
        stage: [path for change in changes for path in change.get("changed deps", {})]
        for stage, changes in content.items()
    }


def test_only_the_cheap_stages_read_the_raw_data() -> None:
    assert [name for name, stage in STAGES.items() if "data/raw" in stage["deps"]] == READ_RAW


def test_no_stage_depends_on_where_a_model_came_from() -> None:
    assert not [dep for stage in STAGES.values() for dep in stage["deps"] if dep.endswith("provenance.json")]


def test_every_picture_is_drawn_from_an_out() -> None:
    outs = {out for stage in STAGES.values() for out in stage["outs"] if isinstance(out, str)}
    drawn = [entry for picture in GRAPH["plots"] for entry in next(iter(picture.values()))["y"]]
    assert set(drawn) <= outs


def test_every_result_can_come_from_the_run_cache() -> None:
    """DVC keeps no stage in its run cache that has an out without cache which is neither a metric nor a plot."""
    uncached = {name for name, stage in STAGES.items() for out in stage["outs"] if isinstance(out, dict)}
    assert uncached == {"check", "check_data"}


@pytest.mark.slow
def test_a_raw_file_that_no_parameter_names_runs_the_cheap_stages_alone(finished: Project) -> None:
    (finished.root / "data/raw/README.md").write_text("another page\n", encoding="utf-8")
    (finished.root / "data/raw/labels.jsonl").write_text('{"prompt": "a?"}\n', encoding="utf-8")
    assert finished.repro() == READ_RAW


@pytest.mark.slow
def test_new_evaluation_prompts_concern_the_stages_that_read_them(finished: Project) -> None:
    prompts = finished.root / "data/raw/mine.jsonl"
    prompts.write_text('{"prompt": "What could I eat on day one?"}\n', encoding="utf-8")
    finished.set("evaluate.prompts", "mine.jsonl")
    finished.dvc("repro", "ingest")
    concerned = {"best_of_n", "evaluate"}
    assert {
        name for name, deps in stale(finished).items() if "data/ingest/evaluation_prompts.jsonl" in deps
    } == concerned
    assert set(stale(finished)) == {*concerned, "report"}, "the report shows the parameters of the evaluation"


@pytest.mark.slow
def test_a_model_that_comes_out_the_same_ends_the_chain(finished: Project) -> None:
    with (finished.root / "tasks/sft.py").open("a", encoding="utf-8") as file:
        file.write("# a remark\n")
    assert finished.repro() == ["sft"]


@pytest.fixture
def shared(finished: Project, tmp_path: Path) -> Project:
    """A committed project with all results in a folder that is DVC's remote."""
    (tmp_path / "store").mkdir()
    finished.dvc("remote", "add", "--default", "store", str(tmp_path / "store"))
    finished.dvc("push", "--quiet")
    call(finished.root, "git", "add", "--all")
    call(finished.root, "git", *SOMEBODY, "commit", "--quiet", "--message", "results")
    return finished


def clone(project: Project, name: str) -> Project:
    target = project.root.parent / name
    call(project.root.parent, "git", "clone", "--quiet", str(project.root), str(target))
    return Project(target)


@pytest.mark.slow
def test_a_clone_is_up_to_date_after_a_pull(shared: Project) -> None:
    second = clone(shared, "second")
    second.dvc("pull")
    assert second.dvc("status").stdout.strip() == "Data and pipelines are up to date."
    assert second.dvc("params", "diff").stdout.strip() == ""
    shown = json.loads(second.dvc("exp", "show", "--json").stdout)
    assert not [entry for entry in shown if entry.get("error")]
    assert second.repro() == []
    assert call(second.root, "git", "status", "--porcelain") == ""


@pytest.mark.slow
def test_a_clone_fetches_and_runs_what_it_must(shared: Project) -> None:
    """`dvc repro --pull --allow-missing`: nothing, and after an edit of β what depends on it."""
    second = clone(shared, "second")
    assert ran(second, "--pull", "--allow-missing") == []
    assert call(second.root, "git", "status", "--porcelain") == ""
    assert not (second.root / "models/sft").exists()
    second.set("ppo.kl.coef", 0.1)
    assert "ppo.kl.coef" in second.dvc("params", "diff").stdout
    assert ran(second, "--pull", "--allow-missing", "ppo") == ["check", "ppo"]
    assert (second.root / "models/sft/config.json").is_file()
    assert not (second.root / "models/rejection_sft").exists()


def ran(project: Project, *words: str) -> list[str]:
    """The stages that `dvc repro` with these options ran."""
    printed = project.run(sys.executable, "-m", "dvc", "repro", *words)
    assert printed.returncode == 0, printed.stdout + printed.stderr
    return [line.split("'")[1] for line in printed.stdout.splitlines() if line.startswith("Running stage '")]


def test_dvc_shows_metrics_plots_and_the_graph(tiny_run: "TinyRun", tmp_path: Path) -> None:
    project = tiny_run.project
    for words in (("dag",), ("artifacts", "--help")):
        project.dvc(*words)
    shown = json.loads(project.dvc("metrics", "show", "--json").stdout)[""]["data"]
    assert list(shown) == [summary.SUMMARY]
    drawn = json.loads(project.dvc("plots", "show", "--json", "--out", str(tmp_path / "plots")).stdout)
    assert drawn.keys() == {"data"}, "no errors"
    assert list(drawn["data"]) == [name for picture in GRAPH["plots"] for name in picture], "no table as it is"
