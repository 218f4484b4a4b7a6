"""A study file is the call of the command line written down; what it cannot mean is refused by its key."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from flows.cli import main
from flows.commands.study import file, study, tables, trials
from flows.commands.study.trials import Call
from flows.params_file import read_written
from rlhf_core.errors import UserError
from tasks.params.loader import read_yaml
from tasks.stage.dvc_adapter import apply_overrides
from tests.conftest import ROOT, commit

if TYPE_CHECKING:
    from tests.conftest import Ended

STUDY = """
name: rules
params: overlay.yaml
set:
  ppo.kl.coef: [0.05, 0.13]
  evaluate.interpolation: [[0.3, 0.5]]
cases:
  min: {reward.members: 4, reward.combine: min}
  mean: {reward.members: 4, sft: {epochs: 2, batch_size: 128}}
seeds: [1, 2]
methods: [ppo, best_of_n]
objective: gold_policy
constraint: kl_per_sequence < 3
"""
OVERLAY = "threads: 1\nreward: {epochs: 2}\n"


@pytest.fixture
def home(toy: Callable[..., Path]) -> Path:
    """A repository with the project's params.yaml, an overlay and the examples."""
    root = toy({})
    (root / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    (root / "overlay.yaml").write_text(OVERLAY)
    (root / "study.yaml").write_text(STUDY)
    commit(root)
    return root


@pytest.mark.parametrize(
    ("paper", "trials"),
    {
        "gao": 21,
        "gao-leash": 6,
        "ensembles": 15,
        "ensembles-rules": 20,
        "xu": 12,
        "xu-tuning": 3,
        "ahmadian": 10,
        "ahmadian-tuning": 3,
        "ahmadian-ppo": 21,
        "ahmadian-arithmetic": 6,
        "ahmadian-arithmetic-tuning": 3,
    }.items(),
)
def test_every_trial_of_the_papers_has_valid_parameters(home: Path, paper: str, trials: int) -> None:
    """`prepare` refuses a trial that `check` would refuse."""
    (home / "examples").symlink_to(ROOT / "examples")
    path = home / "examples" / "papers" / f"{paper}.yaml"
    name, call = file.read_study(home, path)
    assert (name, len(study.prepare(home, call, name, "HEAD").trials)) == (paper, trials)
    assert f"leash study examples/papers/{path.name}" in path.read_text(encoding="utf-8")


def test_cases_cross_the_grid_and_the_seeds(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each trial has the parameters of its case, on those of the overlay."""
    name, call = file.read_study(home, home / "study.yaml")
    made = study.prepare(home, call, name, "HEAD")
    assert [trial.name for trial in made.trials] == [
        f"rules-case={case}-coef={coef}-seed={seed}" for case in ("min", "mean") for coef in (0.05, 0.13)
        for seed in (1, 2)
    ]  # fmt: skip
    last = made.trials[-1].params
    assert (last["threads"], last["reward"]["epochs"], last["reward"]["learning_rate"]) == (1, 2, 6e-4)
    assert (last["reward"]["members"], last["sft"]["epochs"], last["sft"]["max_tokens"]) == (4, 2, 128)
    assert (last["seed"], last["ppo"]["kl"]["coef"], last["evaluate"]["interpolation"]) == (2, 0.13, [0.3, 0.5])
    assert (last["dpo"]["enabled"], last["best_of_n"]["enabled"]) == (False, True)
    first = made.trials[0].params
    assert (first["reward"]["combine"], first["sft"]["epochs"]) == ("min", 6)
    assert next(iter(tables.by_setting(made.trials))) == "case min, coef 0.05"


def test_the_record_keeps_the_file_and_an_equal_one_continues(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`find`, which docs/make_papers.py uses, leaves the record as it is."""
    monkeypatch.setattr("sys.argv", ["/bin/leash", "study", "study.yaml"])
    name, call = file.read_study(home, home / "study.yaml")
    begun = study.prepare(home, call, name, "HEAD")
    record = json.loads((begun.folder / "study.json").read_text())["call"]
    assert record["params"] == {"threads": 1, "reward": {"epochs": 2}}
    assert record["cases"]["min"] == ["reward.members=4", "reward.combine=min"]
    (home / "params.yaml").write_text((home / "params.yaml").read_text().replace("threads: 2", "threads: 4"))
    commit(home)
    monkeypatch.setattr("sys.argv", ["make_papers.py", "rules"])
    study.find(home, file.read_study(home, home / "study.yaml")[1], name, "HEAD")
    assert json.loads((begun.folder / "study.json").read_text())["command"] == "leash study study.yaml"
    again = study.prepare(home, file.read_study(home, home / "study.yaml")[1], name, "HEAD")
    assert (again.commit, [trial.params for trial in again.trials]) == (begun.commit, [t.params for t in begun.trials])
    (home / "overlay.yaml").write_text("threads: 3\n")
    with pytest.raises(UserError, match="study rules was begun as"):
        study.prepare(home, file.read_study(home, home / "study.yaml")[1], name, "HEAD")


def test_a_study_that_an_earlier_version_has_begun_continues(home: Path) -> None:
    call = Call(("ppo.kl.coef=0.05,0.1",))
    begun = study.prepare(home, call, "betas", "HEAD")
    path = begun.folder / "study.json"
    content = json.loads(path.read_text())
    del content["call"]["cases"], content["call"]["params"]
    path.write_text(json.dumps(content))
    assert study.prepare(home, call, "betas", "HEAD").commit == begun.commit


def test_without_cases_a_file_is_the_command_line(home: Path) -> None:
    (home / "study.yaml").write_text("set: {ppo.kl.coef: [0.05, 0.1], sft.epochs: 2}\nseeds: [1, 2]\n")
    words = ("ppo.kl.coef=0.05,0.1", "sft.epochs=2", "seed=1,2")
    assert file.read_study(home, home / "study.yaml") == (None, Call(words))


def test_an_empty_list_of_methods_is_ppo_alone(home: Path) -> None:
    (home / "study.yaml").write_text("methods: []\n")
    assert file.read_study(home, home / "study.yaml")[1] == Call((), ("ppo",))


@pytest.mark.parametrize("name", ["quick", "tiny", "arithmetic", "reviews", "qwen-8b-8gpus", "smollm2-sentiment"])
def test_a_whole_parameter_file_takes_the_place_of_the_committed_one(tmp_path: Path, name: str) -> None:
    """Also methods that only params.yaml switches on are gone."""
    example = ROOT / "examples" / f"{name}.yaml"
    text = (ROOT / "params.yaml").read_text(
        encoding="utf-8"
    ) + "\nround:\nscorer: [{term: reward_model, weight: 1.0}]\n"
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    apply_overrides(tmp_path, file.changes(read_written(tmp_path / "params.yaml"), read_written(example)))
    assert read_yaml(tmp_path / "params.yaml") == read_yaml(example)


@pytest.mark.parametrize(
    "value",
    [1e-5, 3, True, None, "min", "null", "True", "", "a, b", "it's", "C:\\", "\\'", "x=1", "ü\n", [], [[1], "a b"],
     {"a": [0.5, None], "b": {"c": "-"}}],
)  # fmt: skip
def test_every_value_reaches_params_as_it_is(tmp_path: Path, value: Any) -> None:
    (tmp_path / "params.yaml").write_text("ppo: {other: 1}\n")
    apply_overrides(tmp_path, [f"ppo.here={file.as_word(value)}"])
    content = YAML(typ="safe", pure=True).load(tmp_path / "params.yaml")
    assert content == {"ppo": {"other": 1, "here": value}}
    assert type(content["ppo"]["here"]) is type(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sets: {}", "study.yaml: sets: unknown parameter; did you mean set?"),
        ("seeds: 1", "study.yaml: seeds: "),
        ("cases: {min: 3}", "study.yaml: cases.min: "),
        ("set: {a: 1}\ncases: {x: {a: 2}}", "set, seeds or cases.x: a would set one parameter twice"),
        ("set: {ppo.kl: {coef: 1}}\ncases: {x: {ppo.kl.coef: 2}}", "ppo.kl.coef and ppo.kl would set one parameter"),
        ("set: {seed: [1, 2]}\nseeds: [1]", "set and seeds: seed would set one parameter twice"),
        ("cases: {x: {seed: 1}}", "cases.x.seed: all cases have the same seeds"),
        ("set: {a: []}", "study.yaml: set.a: no value to try"),
        ("set: {a: '${b}'}", "study.yaml: '${b}': ${…} would be replaced"),
        ("params: absent.yaml", "absent.yaml: file not found"),
    ],
)
def test_what_is_refused(home: Path, text: str, says: str) -> None:
    (home / "study.yaml").write_text(text)
    with pytest.raises(UserError) as refused:
        file.read_study(home, home / "study.yaml")
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["study.yaml", "-S", "seed=1"], "study.yaml: -S, --methods, --search"),
        (["absent.yaml"], "absent.yaml: file not found; name a study file"),
        (["wrong.yaml"], "wrong-case=x/params.yaml: ppo.kl.koef: unknown parameter; did you mean coef?"),
    ],
)
def test_a_wrong_call_is_one_line_and_changes_nothing(
    home: Path, in_process: Callable[..., "Ended"], monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    (home / "wrong.yaml").write_text("name: wrong\ncases: {x: {ppo.kl.koef: 1}}\n")
    monkeypatch.setattr(sys, "argv", ["leash", "study", *words])
    ended = in_process(home, main)
    assert (ended.code, ended.stderr.count("\n")) == (2, 1)
    assert says in ended.stderr
    assert not (home / "work/studies").exists()


def test_the_overrides_of_a_case_stand_for_its_name() -> None:
    space = trials.read_space(["a=1,2"], (), {"x": ("b=1", "c=2")})
    (only,) = space.trials("s", ["x", "2"])
    assert (only.name, only.overrides) == ("s-case=x-a=2", ("b=1", "c=2", "a=2"))
