"""`leash compare`: which run a name means, and the table of several."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from dvc.repo import Repo

from flows.commands.compare.compare import compare
from flows.commands.compare.sources import Compared, comparable, find
from rlhf_core.errors import UserError
from tasks.naming import experiment_name
from tasks.page.comparison_table import COLUMNS, label
from tasks.tracking import record, settings
from tasks.tracking.defaults import filled
from tasks.tracking.exporter import export
from tests.tasks.tracking import conftest as tracked

PARAMS = "seed: {seed}\nruntime: {{progress_seconds: {seed}}}\nppo: {{kl: {{coef: 0.1}}}}\n"


def evaluation(gold: float) -> dict[str, Any]:
    models = {
        "sft": {"gold": 1.0, "gold_low": 0.9, "gold_high": 1.1, "win_rate": None, "kl": 0.0},
        "policy": {"gold": gold, "gold_low": gold - 0.1, "gold_high": gold + 0.1, "win_rate": 0.8, "kl": 2.5},
        "best_of_4": {"gold": 2.0, "win_rate": 0.7, "kl": 0.64},
    }
    return {
        "win_rate_judge": "gold rubric (simulated)",
        "prompts": 400,
        "seeds": [1, 2],
        "win_rate": 0.8,
        "models": models,
    }


def write(folder: Path, gold: float, seed: int = 1) -> Path:
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    (folder / "metrics" / "evaluate.json").write_text(json.dumps(evaluation(gold)), encoding="utf-8")
    (folder / "params.yaml").write_text(PARAMS.format(seed=seed), encoding="utf-8")
    return folder


def git(root: Path, *words: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with gold 3 at its tag `old`, and 4 in its files."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    root = write(tmp_path / "project", 3.0)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "old")
    git(root, "tag", "old")
    return write(root, 4.0, seed=2)


def set_by(run: Compared) -> dict[str, str]:
    """The parameters of a run that have no default, or another value."""
    return {name: text for name, text in (run.params or {}).items() if filled({}).get(name) != text}


def test_no_name_is_this_checkout(project: Path) -> None:
    content, text = compare(project, [], [])
    assert content["runs"][0]["models"]["policy"]["gold"] == 4.0
    assert content["parameters"] == {}
    expected = ".: this checkout judged by gold rubric (simulated), 400 prompts, sampling seeds 1, 2 model"
    assert " ".join(text.split()).startswith(expected)
    rows = [line.split() for line in text.splitlines() if line.startswith(label("policy"))]
    assert rows[0][:6] == ["PPO", "policy", "4.00", "[3.90,", "4.10]", "*"]


def test_a_folder_and_a_revision_side_by_side(project: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "elsewhere", 5.0, seed=1)
    content, text = compare(project, ["old", str(other), "."], ["policy", "best_of_4"])
    assert [run["models"]["policy"]["gold"] for run in content["runs"]] == [3.0, 5.0, 4.0]
    assert [list(run["models"]) for run in content["runs"]] == [["policy", "best_of_4"]] * 3
    assert content["runs"][0]["source"] == f"git {git(project, 'rev-parse', 'old')[:8]}"
    assert content["parameters"] == {"seed": ["1", "1", "2"]}
    lines = text.splitlines()
    assert [line.split()[0] for line in lines if "PPO policy" in line][:3] == ["old", f"…{str(other)[-19:]}", "."]
    assert next(line for line in lines if line.startswith("seed")).split() == ["seed", "1", "1", "2"]
    assert lines.index("parameter  old  …" + str(other)[-19:] + "  .") < text.splitlines().index(
        next(line for line in lines if "PPO policy" in line)
    )


def answers(folder: Path, golds: dict[str, list[float]]) -> Path:
    """Two seeds that answer each prompt with the same gold score."""
    rows = [
        {
            "model": model,
            "seed": seed,
            "prompt_id": f"p{i}",
            "prompt": "p",
            "response": "a",
            "gold": gold,
            "kl": 0.5,
            "reward": 1.0,
            "tokens": 10 + i,
        }
        for model, values in golds.items()
        for seed in (1, 2)
        for i, gold in enumerate(values)
    ]
    path = folder / "data" / "evaluate" / "answers.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_difference_of_two_runs_is_paired_by_prompt(project: Path, tmp_path: Path) -> None:
    """Prompts differ by far more than the runs: only paired has the difference no width. One prompt is not shared."""
    other = write(tmp_path / "elsewhere", 5.0)
    answers(project, {"sft": [0.0, 9.0, 4.0], "policy": [1.0, 10.0, 5.0]})
    answers(other, {"sft": [0.0, 9.0, 4.0, 7.0], "policy": [1.5, 10.5, 5.5, 9.0]})
    content, text = compare(project, [".", str(other)], [])
    (found,) = content["differences"]
    assert (found["prompts"], list(found["models"])) == (3, ["sft", "policy"])
    assert found["models"]["policy"]["gold"] == {"difference": 0.5, "low": 0.5, "high": 0.5}
    assert "reward" not in found["models"]["policy"], "the runs have no reward model in common"
    assert "paired by prompt (3 prompts)" in " ".join(text.split())
    assert any("PPO policy" in line and "+0.50 [+0.50, +0.50]" in line for line in text.splitlines())


def test_without_answers_one_line_explains_why_there_is_no_difference(project: Path, tmp_path: Path) -> None:
    answers(project, {"sft": [0.0, 9.0]})
    content, text = compare(project, [".", str(write(tmp_path / "elsewhere", 5.0))], [])
    assert (
        "neither its dvc.lock nor its run in MLflow names data/evaluate/answers.jsonl"
        in content["differences"][0]["missing"]
    )
    assert "no paired difference" in " ".join(text.split())
    answers(tmp_path / "elsewhere", {"sft": [0.0]})
    content, _ = compare(project, [".", str(tmp_path / "elsewhere")], [])
    assert "no model and prompts in common" in content["differences"][0]["missing"]


def test_answers_of_a_revision_come_from_the_cache_of_dvc(project: Path) -> None:
    """What dvc.lock of the commit names; without it in the cache, how to get it."""
    path = answers(project, {"sft": [0.0, 9.0]})
    old = path.read_bytes()
    digest = hashlib.md5(old, usedforsecurity=False).hexdigest()
    (project / "dvc.lock").write_text(lock_of(digest), encoding="utf-8")
    Repo.init(str(project)).close()
    git(project, "add", "dvc.lock")
    git(project, "commit", "--quiet", "-m", "with a lock")
    git(project, "tag", "locked")
    answers(project, {"sft": [1.0, 10.0]})
    assert "neither the DVC cache of" in compare(project, ["locked", "."], [])[0]["differences"][0]["missing"]
    cached = project / ".dvc/cache/files/md5" / digest[:2] / digest[2:]
    cached.parent.mkdir(parents=True)
    cached.write_bytes(old)
    found = compare(project, ["locked", "."], [])[0]["differences"][0]
    assert found["models"]["sft"]["gold"]["difference"] == 1.0


def test_answers_of_another_clone_come_from_its_cache(project: Path, tmp_path: Path) -> None:
    answers(project, {"sft": [0.0, 9.0]})
    other = write(tmp_path / "elsewhere", 5.0)
    path = answers(other, {"sft": [1.0, 10.0]})
    digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    (other / "dvc.lock").write_text(lock_of(digest), encoding="utf-8")
    Repo.init(str(other), no_scm=True).close()
    cached = other / ".dvc/cache/files/md5" / digest[:2] / digest[2:]
    cached.parent.mkdir(parents=True)
    path.rename(cached)
    found = compare(project, [".", str(other)], [])[0]["differences"][0]
    assert found["models"]["sft"]["gold"]["difference"] == 1.0


def lock_of(digest: str, metrics: str = "") -> str:
    hashes = {"data/evaluate/answers.jsonl": digest, "metrics/evaluate.json": metrics}
    outs = [{"path": path, "hash": "md5", "md5": value, "size": 1} for path, value in hashes.items() if value]
    return json.dumps({"schema": "2.0", "stages": {"evaluate": {"cmd": "evaluate", "outs": outs}}})


def lock(seed: int, made: str = "aa") -> str:
    """A dvc.lock in which `evaluate` read what `ppo` made if that is aa; `report` ran with other parameters."""
    return f"""\
stages:
  ppo:
    params: {{params.yaml: {{seed: {seed}, ppo: {{kl: {{coef: 0.1}}}}}}}}
    outs: [{{path: models/policy, md5: {made}}}]
  evaluate:
    deps: [{{path: models/policy, md5: aa}}, {{path: data/raw, md5: bb}}]
    params: {{params.yaml: {{seed: {seed}}}}}
  report:
    params: {{params.yaml: {{seed: 9, sft: {{epochs: 6}}}}}}
"""


def test_parameters_are_those_that_made_the_figures(project: Path) -> None:
    """An edit of params.yaml after the run is reported, and changes no comparison."""
    (project / "dvc.lock").write_text(lock(seed=1), encoding="utf-8")
    content, text = compare(project, ["old", "."], [])
    assert content["parameters"] == {}
    assert content["runs"][1]["source"] == "this checkout, whose params.yaml was edited since"
    assert "no parameter differs" in text.splitlines()
    git(project, "add", "dvc.lock")
    git(project, "commit", "--quiet", "-m", "lock")
    (project / "dvc.lock").write_text(lock(seed=2), encoding="utf-8")
    content, _ = compare(project, ["HEAD", "."], [])
    assert content["parameters"] == {"seed": ["1", "2"]}
    assert set_by(find(project, ".")) == {"seed": "2", "ppo.kl.coef": "0.1"}, "report is not behind the figures"
    assert content["runs"][1]["source"] == "this checkout"
    with (project / "params.yaml").open("a", encoding="utf-8") as file:
        file.write("report: {samples: 3}\n")
    assert find(project, ".").source == "this checkout", "what evaluate does not depend on"
    (project / "params.yaml").write_text("seed: 2\nppo: {kl: {coef: 0.1, target: 7}}\n", encoding="utf-8")
    assert find(project, ".").source == "this checkout, whose params.yaml was edited since"


def test_parameters_are_not_known_where_a_stage_before_has_run_since(project: Path) -> None:
    (project / "dvc.lock").write_text(lock(seed=2, made="cc"), encoding="utf-8")
    run = find(project, ".")
    assert run.params is None
    assert run.source.endswith("whose dvc.lock records newer results than these figures were made from")


@pytest.mark.parametrize("text", ["stages: [", "stages:\n  ppo:\n", "stages: [a]\n", "\0"])
def test_a_broken_lock_is_refused_with_its_path(project: Path, text: str) -> None:
    (project / "dvc.lock").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"/dvc\.lock: cannot be read"):
        find(project, ".")


def test_narrow_terminals_get_all_columns_in_bands(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        _, text = compare(project, ["old", "."], [])
        assert max(map(len, text.splitlines())) <= width
        heads = " ".join(line for line in text.splitlines() if line.startswith("run "))
        wanted = ("gold", "win_rate") if width == 60 else ("gold", "win_rate", "kl")  # the others: --all
        for column in COLUMNS:
            assert (column.name in heads) == (column.key in wanted)


def test_runs_with_other_judges_are_marked(project: Path, tmp_path: Path) -> None:
    assert "NOTE" not in compare(project, ["old", "."], [])[1]
    other = write(tmp_path / "elsewhere", 5.0)
    changed = evaluation(5.0) | {"win_rate_judge": "reward model"}
    (other / "metrics" / "evaluate.json").write_text(json.dumps(changed), encoding="utf-8")
    (other / "params.yaml").unlink()
    _, text = compare(project, [".", str(other)], [])
    assert "NOTE: the runs differ in judge, prompts or sampling seeds" in text
    assert "are not known" in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "nothing",
            "nothing: no run; tried a folder, a revision of git, a DVC experiment, and MLflow at .*not there yet",
        ),
        ("metrics", r"metrics/evaluate.json: file not found"),
        ("--all", "--all: no run"),
    ],
)
def test_what_is_not_a_run_is_refused_with_what_was_tried(
    project: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.chdir(project)
    with pytest.raises(UserError, match=words):
        find(project, name)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "no result of `evaluate`"),
        ("[]", "no result of `evaluate`"),
        ('{"models": {}}', "holds no `models` to compare"),
        ('{"models": {"policy": 3}}', "holds no `models` to compare"),
    ],
)
def test_figures_that_cannot_be_compared_are_refused_with_their_file(project: Path, content: str, words: str) -> None:
    (project / "metrics/evaluate.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=rf"metrics/evaluate\.json: {words}"):
        find(project, ".")


def test_unknown_models_are_refused(project: Path) -> None:
    with pytest.raises(UserError, match="no run has a model called dpo; there are sft, policy, best_of_4"):
        compare(project, [], ["policy", "dpo"])


def test_a_revision_without_figures_is_refused(project: Path) -> None:
    git(project, "rm", "--quiet", "--cached", "metrics/evaluate.json")
    git(project, "commit", "--quiet", "-m", "none")
    with pytest.raises(UserError, match=r"HEAD: commit [0-9a-f]{8} has no metrics/evaluate.json"):
        find(project, "HEAD")


def test_figures_of_a_revision_come_from_the_cache(project: Path) -> None:
    path = project / "metrics/evaluate.json"
    digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    Repo.init(str(project)).close()
    (project / "dvc.lock").write_text(lock_of("", digest), encoding="utf-8")
    git(project, "rm", "--quiet", "--cached", "metrics/evaluate.json")
    git(project, "add", "dvc.lock")
    git(project, "commit", "--quiet", "-m", "new")
    with pytest.raises(UserError, match=r"metrics/evaluate.json of [0-9a-f]{8}: neither DVC's cache nor its default"):
        find(project, "HEAD")
    cached = project / ".dvc/cache/files/md5" / digest[:2] / digest[2:]
    cached.parent.mkdir(parents=True)
    path.rename(cached)
    assert find(project, "HEAD").evaluation["models"]["policy"]["gold"] == 4.0
    assert find(project, "old").evaluation["models"]["policy"]["gold"] == 3.0, "in git"


def track(root: Path, key: str, stage: str, artifact: bool = True) -> None:
    folder = tracked.pipeline(root, key * 64, tags={"leash.commit": key * 40})
    live = tracked.stage(root, folder, stage, key * 63 + stage[0])
    if not artifact:
        shutil.rmtree(live.folder / record.FILES)


def ids(root: Path) -> dict[str, str]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(settings.tracking_uri(root))
    found = client.search_runs([client.get_experiment_by_name(experiment_name(root)).experiment_id])
    return {str(run.info.run_name): run.info.run_id for run in found}


def test_runs_of_mlflow_by_id_beginning_and_name(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings.CLIENT_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    track(project, "a", "evaluate")
    track(project, "a", "sft")
    track(project, "b", "sft")
    export(project)
    known = ids(project)
    write(project, 9.0)
    for name in (known["evaluate"], known["evaluate"][:8], "evaluate", "aaaaaaa", known["aaaaaaa"]):
        run = find(project, name)
        assert run.source == f"MLflow run {known['evaluate']}"
        assert run.evaluation["models"]["policy"]["gold"] == 4.0
        assert run.params is not None
        assert tracked.PARAMS.items() <= run.params.items(), "with the defaults of the others"
    with pytest.raises(UserError, match=r"pipeline run .* has no finished run of evaluate"):
        find(project, "bbbbbbb")
    for unknown in ("sft", known["evaluate"][:5], "evaluat"):
        with pytest.raises(UserError, match=r"no run; .*MLflow at .*\(id, beginning of an id, or name\)"):
            find(project, unknown)
    git(project, "tag", "evaluate")
    assert find(project, "evaluate").source.startswith("git ")
    track(project, "c", "evaluate", artifact=False)
    export(project)
    git(project, "tag", "-d", "evaluate")
    with pytest.raises(UserError, match=r"evaluate: 2 runs in MLflow have this name; use an id"):
        find(project, "evaluate")
    with pytest.raises(UserError, match=r"has no artifact metrics/evaluate.json"):
        find(project, "ccccccc")


def test_a_server_that_does_not_answer_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError, match=r"MLflow at http://127.0.0.1:9 \(which does not answer") as error:
        find(project, "nothing")
    assert "secret" not in str(error.value)


def test_an_experiment_is_found_by_its_name(project: Path) -> None:
    """DVC keeps it at refs/exps/BASELINE/NAME."""
    git(project, "commit", "--all", "--quiet", "-m", "a trial")
    git(project, "update-ref", f"refs/exps/aa/{'b' * 38}/coef-0.2", "HEAD")
    git(project, "reset", "--quiet", "--hard", "old")
    run = find(project, "coef-0.2")
    assert (run.source, run.evaluation["models"]["policy"]["gold"]) == ("DVC experiment", 4.0)
    assert compare(project, ["old", "coef-0.2"], [])[0]["parameters"] == {"seed": ["1", "2"]}


def test_a_clean_checkout_is_not_called_edited(project: Path) -> None:
    """dvc.lock has parameters that params.yaml may lack: deterministic, precision, reward_model, scorer."""
    methods = {"deterministic": True, "precision": "float32", "reward_model": True, "dpo": {"enabled": False},
               "raw_files": {"prompts": None, "texts": [], "pretrained": None},
               "scorer": [{"term": "reward_model", "weight": 1.0}]}  # fmt: skip
    params = {"params.yaml": {"seed": 2, "ppo": {"kl": {"coef": 0.1}}}, "data/methods.json": methods}
    content = {"stages": {"evaluate": {"cmd": "evaluate", "params": params}}}
    (project / "dvc.lock").write_text(json.dumps(content), encoding="utf-8")
    run = find(project, ".")
    assert (run.source, set_by(run)) == ("this checkout", {"seed": "2", "ppo.kl.coef": "0.1"})


def test_a_run_of_mlflow_is_paired_with_the_answers_that_dvc_has(project: Path) -> None:
    """Its metrics have the bytes of those in a dvc.lock, which names the answers."""
    path = answers(project, {"sft": [0.0, 9.0], "policy": [1.0, 10.0]})
    digests = [hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()
               for file in (path, project / "metrics/evaluate.json")]  # fmt: skip
    Repo.init(str(project)).close()
    cached = project / ".dvc/cache/files/md5" / digests[0][:2] / digests[0][2:]
    cached.parent.mkdir(parents=True)
    cached.write_bytes(path.read_bytes())
    (project / "dvc.lock").write_text(lock_of(*digests), encoding="utf-8")
    git(project, "add", "dvc.lock")
    git(project, "commit", "--quiet", "-m", "the run")
    track(project, "a", "evaluate")
    export(project)
    (project / "dvc.lock").unlink()
    answers(write(project, 9.0), {"sft": [0.0, 9.0], "policy": [1.5, 10.5]})
    (found,) = compare(project, ["aaaaaaa", "."], [])[0]["differences"]
    assert found["models"]["policy"]["gold"]["difference"] == 0.5


def test_two_runs_fit_on_a_screen(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The differences come first, and `--all` has the rest."""
    other = write(tmp_path / "elsewhere", 5.0)
    changed = evaluation(5.0)
    changed["models"] |= {f"best_of_{n}": {"gold": 2.0, "win_rate": 0.7, "kl": 0.6, "overlap": 0.1} for n in range(20)}
    for folder in (project, other):
        (folder / "metrics/evaluate.json").write_text(json.dumps(changed), encoding="utf-8")
        answers(folder, {name: [0.0, 1.0] for name in changed["models"]})
    params = "".join(f"ppo{n}: {{x: {n}}}\n" for n in range(30))
    (other / "params.yaml").write_text(params, encoding="utf-8")
    monkeypatch.setenv("COLUMNS", "120")
    _, text = compare(project, [".", str(other)], [])
    assert len(text.splitlines()) <= 26
    assert text.index("more parameters differ: --all") < text.index("paired by prompt") < text.index("best of its run")
    _, whole = compare(project, [".", str(other)], [], everything=True)
    assert "--all" not in whole
    assert len(whole.splitlines()) > 100


def test_sft_that_is_off_is_a_difference_and_a_method_that_is_off_is_none() -> None:
    found = comparable({"sft.enabled": "false", "dpo.enabled": "false"})
    assert found["sft.enabled"] == "false"
    assert "dpo.enabled" not in found
