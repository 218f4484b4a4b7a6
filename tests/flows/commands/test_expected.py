"""`leash check-results`: the committed demo passes, the first stage that is off is named, and figures that belong to
other parameters are not compared."""

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flows.cli import main
from flows.commands import expected
from flows.params_file import read_written
from rlhf_core.errors import UserError
from tasks.records.recorded import recorded
from tasks.stage.dvc_files import md5_of
from tests.conftest import ROOT

if TYPE_CHECKING:
    from tests.conftest import Ended

DEMO = ROOT / "examples/demo.expected.yaml"


def record(root: Path, stage: str, figures: dict[str, Any]) -> None:
    """Write metrics/STAGE.json, and its hash into dvc.lock."""
    path = root / f"metrics/{stage}.json"
    before = recorded(root)[stage].outs[f"metrics/{stage}.json"]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(figures))
    lock = root / "dvc.lock"
    lock.write_text(lock.read_text(encoding="utf-8").replace(before, md5_of(path)), encoding="utf-8")


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The committed demo: git has the figures of metrics/summary.json; the loss of SFT is the expected one."""
    root = tmp_path_factory.mktemp("committed")
    for name in ("dvc.yaml", "dvc.lock", "params.yaml"):
        shutil.copyfile(ROOT / name, root / name)
    (root / "data").mkdir()
    shutil.copytree(ROOT / "examples", root / "examples")
    summary = json.loads((ROOT / "metrics/summary.json").read_text(encoding="utf-8"))
    sft = read_written(DEMO)["sft"]
    record(root, "sft", {name: figure["value"] for name, figure in sft.items()})
    record(root, "reward", {"heldout_accuracy": summary["reward_accuracy"]})
    record(root, "evaluate", summary)
    return root


@pytest.fixture
def demo(committed: Path, tmp_path: Path) -> Path:
    """A copy of it: reading dvc.lock three times takes seconds."""
    return shutil.copytree(committed, tmp_path, dirs_exist_ok=True)


def test_the_demo_of_the_example_is_that_of_params() -> None:
    assert (ROOT / "examples/demo.yaml").read_bytes() == (ROOT / "params.yaml").read_bytes()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.expected.yaml")), ids=lambda path: path.stem)
def test_every_file_is_of_its_example_and_of_figures_that_runs_have(path: Path) -> None:
    content = read_written(path)
    assert content.pop("params") == f"examples/{path.name.removesuffix('.expected.yaml')}.yaml"
    assert content
    assert all(set(figures) <= set(expected.FIGURES[stage]) for stage, figures in content.items())
    assert all(figure["tolerance"] > 0 for figures in content.values() for figure in figures.values())


def test_the_committed_demo_passes(demo: Path) -> None:
    another = DEMO.read_text(encoding="utf-8").replace("examples/demo.yaml", "examples/quick.yaml")
    for name in ("a", "z"):  # files of other parameters, before and after it
        (demo / f"examples/{name}.expected.yaml").write_text(another, encoding="utf-8")
    found = expected.check(demo, None)
    assert (found["file"], found["first_off"]) == ("examples/demo.expected.yaml", None)
    assert {row["stage"] for row in found["figures"]} == {"sft", "reward", "evaluate"}
    assert all(row["tolerance"] > 0 for row in found["figures"])
    assert expected.render(found).endswith("\nall within tolerance")


def test_the_first_stage_that_is_off_is_named(
    demo: Path, in_process: Callable[..., "Ended"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First in the order of the pipeline."""
    evaluate = json.loads((demo / "metrics/evaluate.json").read_text())
    record(demo, "evaluate", evaluate | {"win_rate": 0.5})
    record(demo, "reward", {"heldout_accuracy": 0.7})
    monkeypatch.setattr(sys, "argv", ["leash", "check-results"])
    ended = in_process(demo, main)
    assert ended.code == 1
    lines = ended.stdout.splitlines()
    assert lines[-1] == "the first stage that is off: reward (heldout_accuracy)"
    assert [line.split()[:2] for line in lines if "off by" in line] == [
        ["reward", "heldout_accuracy"], ["evaluate", "win_rate"],
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["leash", "check-results", "--json"])
    assert json.loads(in_process(demo, main).stdout)["first_off"] == "reward"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_other_parameters_are_named(demo: Path) -> None:
    edit(demo / "params.yaml", "coef: 0.13", "coef: 0.2")
    with pytest.raises(UserError, match=r"demo.yaml, and params.yaml has other values of ppo.kl.coef;"):
        expected.check(demo, None)


def test_what_changes_no_figure_may_differ(demo: Path) -> None:
    edit(demo / "params.yaml", "kl_below: 4.0", "kl_below: 3.0")
    edit(demo / "params.yaml", "judge: {}", "judge: {}\nruntime: {tracking: false}")
    assert expected.check(demo, None)["first_off"] is None


def test_another_training_seed_is_compared(demo: Path) -> None:
    """Figures that were made with it; those of another seed are of another run."""
    edit(demo / "params.yaml", "\nseed: 1\n", "\nseed: 2\n")
    with pytest.raises(UserError, match=r"metrics/evaluate.json: made with seed 1, now 2;"):
        expected.check(demo, None)
    edit(demo / "dvc.lock", "\n        seed: 1\n", "\n        seed: 2\n")
    assert expected.check(demo, None)["first_off"] is None


def test_figures_of_another_run_are_refused(demo: Path) -> None:
    """In a clone they are missing; after an edit of params.yaml they are of the parameters before."""
    (demo / "metrics/sft.json").unlink()
    (demo / "metrics/reward.json").write_text("{}")
    for name in ("params.yaml", "examples/demo.yaml"):
        edit(demo / name, "max_prompts: 400", "max_prompts: 300")
    with pytest.raises(UserError) as refused:
        expected.check(demo, None)
    lines = str(refused.value).splitlines()
    assert lines[0].startswith("metrics/sft.json: file not found; `dvc pull metrics/sft.json` fetches it")
    assert lines[1].startswith("metrics/reward.json: dvc.lock does not say how it was made")
    assert lines[2].startswith("metrics/evaluate.json: made with evaluate.max_prompts 400, now 300")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("reward:", "rewad:", "rewad: no such stage; did you mean reward?"),
        ("heldout_accuracy:", "heldout_acuracy:", "heldout_acuracy: no such number; did you mean heldout_accuracy?"),
        ("tolerance: 0.036", "tolerence: 0.036", "sft.validation_loss.tolerence: unknown parameter; did you mean tol"),
        ("reward:", "reward: 1\nrewards:", "write `params: FILE`, and for each stage METRIC: {value: …, tolerance: …}"),
        ("\nsft:", "\nsft: {}\nsfts:", "write `params: FILE`"),
        ("params: examples/demo.yaml", "params: examples/absent.yaml", "absent.yaml: file not found"),
    ],
)
def test_a_wrong_file_is_refused_by_name(demo: Path, old: str, new: str, says: str) -> None:
    edit(demo / "examples/demo.expected.yaml", old, new)
    with pytest.raises(UserError) as refused:
        expected.check(demo, None)
    assert says in str(refused.value)


def test_a_file_is_made_from_a_run(demo: Path) -> None:
    record(demo, "ppo", {"reward_last": 5.5, "kl_last": None, "steps": 28})
    (demo / "examples/demo.expected.yaml").unlink()
    with pytest.raises(UserError, match="--write` makes one"):
        expected.check(demo, None)
    expected.write(demo, None, 0.1)
    with pytest.raises(UserError, match=r"demo.expected.yaml: is there already, with tolerances set by hand"):
        expected.write(demo, None, 0.1)
    with pytest.raises(UserError, match=r"x.yaml: cannot be written \(Not a directory\)"):
        expected.write(demo, demo / "params.yaml/x.yaml", 0.1)
    with pytest.raises(UserError, match="--tolerance inf: give a number"):
        expected.write(demo, demo / "new.yaml", math.inf)
    found = expected.check(demo, None)
    assert found["first_off"] is None
    assert [(row["expected"], row["tolerance"]) for row in found["figures"] if row["stage"] == "ppo"] == [(5.5, 0.55)]
    edit(demo / "params.yaml", "coef: 0.13", "coef: 0.2")
    with pytest.raises(UserError, match=r"copy it to examples/NAME.yaml first"):
        expected.write(demo, None, 0.1)
