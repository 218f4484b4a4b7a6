"""`leash round`: what it refuses, what a closed round is, and what a kill leaves."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flows import workspace
from flows.cli import main
from flows.commands import rounds as command
from flows.commands.imports import importer
from flows.commands.lineage import Node, lineage, show
from flows.commands.verify import Report, verify_round
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from tasks.params.loader import read_yaml
from tasks.stage.dvc_adapter import needed_objects
from tasks.stage.dvc_files import open_project
from tasks.stage.pipeline_run import identity
from tasks.stage.rounds import last_closed, read_note
from tests.conftest import call

if TYPE_CHECKING:
    from tests.conftest import Ended

GRAPH = """
stages:
  preferences:
    cmd: python worker.py preferences
    deps: [input.txt, rounds]
    outs: [data/preferences/preferences.jsonl, metrics/preferences.json]
  select:
    cmd: python worker.py select
    deps: [data/preferences/preferences.jsonl]
    outs: [models/policy, metrics/evaluate.json, metrics/reward.json]
"""
WORKER = """
import json, pathlib, sys

closed = len(list(pathlib.Path("rounds").glob("*.dvc")))
def write(path, content):
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(path).write_text(json.dumps(content) + "\\n")
if sys.argv[1] == "preferences":
    write("data/preferences/preferences.jsonl", {"round": closed + 1})
    write("metrics/preferences.json", {"pairs": 1000 * (closed + 1)})
else:
    write("models/policy/config.json", {"policy of round": closed + 1})
    write("metrics/evaluate.json", {"gold_policy": 1.5 + closed, "win_rate": None, "kl_per_sequence": 2.0})
    write("metrics/reward.json", {"heldout_accuracy": 0.75, "gold_agreement": 0.7})
"""
SOMEBODY = ("-c", "user.name=a", "-c", "user.email=a@b")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed project whose stages have not run."""
    root = tmp_path_factory.mktemp("rounds") / "project"
    for name, text in {
        "dvc.yaml": GRAPH,
        "worker.py": WORKER,
        "input.txt": "1\n",
        "params.yaml": "seed: 7\n",
        "rounds/README.md": "rounds\n",
        "rounds/.gitignore": "/*/\n",
        ".dvcignore": "work\n*.partial\n",
        ".gitignore": "/work\n*.partial\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    call(root, "git", "init", "--quiet")
    call(root, sys.executable, "-m", "dvc", "init", "--quiet")
    call(root, sys.executable, "-m", "dvc", "config", "core.analytics", "false")
    commit(root, "a project")
    return root


@pytest.fixture(scope="module")
def finished_round(template: Path) -> Path:
    """A project whose first round has run and is committed."""
    root = copied(template, template.parent / "ran")
    repro(root)
    commit(root, "a run")
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    """A copy of the project whose stages have not run."""
    return copied(template, tmp_path / "project")


@pytest.fixture
def ran(finished_round: Path, tmp_path: Path) -> Path:
    """A copy of the project whose first round has run."""
    return copied(finished_round, tmp_path / "project")


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target, symlinks=True))


def repro(root: Path) -> None:
    call(root, sys.executable, "-m", "dvc", "repro", "--quiet")


def commit(root: Path, message: str, everything: bool = True) -> None:
    if everything:
        call(root, "git", "add", "--all")
    call(root, "git", *SOMEBODY, "commit", "--quiet", "--message", message)


def status(root: Path) -> list[str]:
    return call(root, "git", "status", "--porcelain").splitlines()


def test_a_closed_round_has_policy_and_pairs_under_dvc_and_names_its_commit(ran: Path) -> None:
    head, policy = call(ran, "git", "rev-parse", "HEAD").strip(), (ran / "models/policy/config.json").read_bytes()
    said = command.close(ran)
    assert said.splitlines()[0] == "round 1 is closed: its policy and 1,000 pairs are in rounds/1"
    assert 'git commit -m "Close round 1"' in said
    assert status(ran) == ["A  rounds/1.dvc"], "git has the .dvc file and nothing else to say"
    note = read_note(ran, 1)
    assert (note["round"], note["commit"], note["seed"]) == (1, head, 7)
    with open_project(ran) as project:
        assert note["policy"] == project.hash_at(ran / "rounds/1/policy") == project.hash_at(ran / "models/policy")
        assert note["preferences"] == project.hash_at(ran / "rounds/1/preferences.jsonl")
        assert [file.path for file in project.tracked] == ["rounds/1"]
    assert note["figures"]["gold_policy"] == 1.5
    assert (ran / "rounds/1/policy/config.json").read_bytes() == policy
    assert last_closed(ran) == 1


def test_a_round_that_functions_alone_have_scored_has_its_policy_and_no_pairs(root: Path) -> None:
    text = WORKER.replace('{"pairs": 1000 * (closed + 1)}', '{"enabled": False}')
    (root / "worker.py").write_text(text.replace('{"heldout_accuracy": 0.75, "gold_agreement": 0.7}', "{}"))
    repro(root)
    commit(root, "a run")
    assert command.close(root).splitlines()[0] == "round 1 is closed: its policy is in rounds/1"
    assert command.table_of(root).splitlines()[1].split()[3:] == ["–", "–", "1.500", "–", "2.000"]


def test_the_next_round_is_another_run_that_goes_on_from_it(ran: Path) -> None:
    def key() -> tuple[str, str]:
        run = identity(ran, read_yaml(ran / "params.yaml"))
        return run["key"], run["tags"].get("leash.round", "1")

    first = key()
    command.close(ran)
    assert key()[0] != first[0]
    assert (first[1], key()[1]) == ("1", "2"), "a run of its own in MLflow"
    with pytest.raises(UserError, match=r"round 2 is not finished, stage preferences: rounds changed; `leash run`"):
        command.close(ran)
    commit(ran, "Close round 1", everything=False)
    repro(ran)
    assert json.loads((ran / "models/policy/config.json").read_text()) == {"policy of round": 2}
    commit(ran, "round 2")
    assert "round 2 is closed" in command.close(ran)
    table = command.table_of(ran).splitlines()
    assert table[0].split()[:3] == ["round", "closed", "commit"]
    assert [line.split()[0] for line in table[1:3]] == ["1", "2"]
    assert table[1].split()[3:] == ["1,000", "0.750", "1.500", "–", "2.000"]
    assert table[-1].startswith("the present round is 3")


def test_a_round_that_is_not_finished_is_refused(ran: Path) -> None:
    (ran / "input.txt").write_text("2\n")
    with pytest.raises(UserError, match=r"round 1 is not finished, stage preferences: input.txt changed"):
        command.close(ran)
    assert not (ran / "rounds/1").exists()
    assert command.table_of(ran) == "the present round is 1; `leash round` closes it when it is finished"


def test_results_that_no_commit_names_are_refused(root: Path) -> None:
    repro(root)
    with pytest.raises(UserError, match=r"dvc.lock.*: not committed, so no commit would name what round 1 was made"):
        command.close(root)
    commit(root, "a run")
    (root / "notes.txt").touch()
    with pytest.raises(UserError, match=r"^notes.txt: not committed"):
        command.close(root)
    assert not (root / "rounds/1").exists()


@pytest.mark.parametrize("place", ["dvc", "git", "copy"])
def test_what_a_kill_leaves_is_finished_by_the_same_command(
    ran: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Killed before `dvc add`, between it and `git add`, and in the middle of the copy."""

    def killed(*words: object) -> None:
        raise KeyboardInterrupt

    if place == "copy":
        (ran / "rounds/.1.partial/policy").mkdir(parents=True)
    else:
        with monkeypatch.context() as patched:
            if place == "dvc":
                patched.setattr(importer, "dvc_add", killed)
            else:
                git = workspace.git
                patched.setattr(workspace, "git", lambda *w: killed() if w[1] == "add" else git(*w))
            with pytest.raises(KeyboardInterrupt):
                command.close(ran)
        assert (ran / "rounds/1.dvc").exists() is (place == "git")
    assert "round 1 is closed" in command.close(ran)
    assert status(ran) == ["A  rounds/1.dvc"]
    assert sorted(path.name for path in (ran / "rounds").iterdir()) == [".gitignore", "1", "1.dvc", "README.md"]


def test_the_bytes_are_on_the_disk_once_where_dvc_uses_links(ran: Path) -> None:
    call(ran, sys.executable, "-m", "dvc", "config", "--local", "cache.type", "hardlink")
    command.close(ran)
    assert (ran / "rounds/1/policy/config.json").stat().st_nlink > 1


def test_a_workspace_at_a_commit_has_its_closed_rounds_and_gc_keeps_them(ran: Path) -> None:
    command.close(ran)
    commit(ran, "Close round 1", everything=False)
    with open_project(ran) as project:
        wanted = {path.parent.name + path.name for _, path in project.cached(project.tracked[0].recorded or "")}
    assert wanted
    assert wanted <= needed_objects(ran)["workspace"]
    with workspace.opened(Workspace(ran, "trial", workspace.resolve(ran, "HEAD"))) as space:
        assert last_closed(space.root) == 1
        assert (space.root / "rounds/1/policy/config.json").is_file()
        workspace.remove(space)


def verdicts(report: Report) -> dict[str, str]:
    return {finding.out: finding.words for finding in report.findings}


@pytest.mark.slow
def test_a_closed_round_can_be_rebuilt_from_its_commit(
    ran: Path, in_process: Callable[..., "Ended"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the project has gone on since, with other code; and rounds/N is compared, not only dvc.lock."""
    command.close(ran)
    commit(ran, "Close round 1", everything=False)
    repro(ran)
    commit(ran, "round 2")
    command.close(ran)
    commit(ran, "Close round 2", everything=False)
    (ran / "worker.py").write_text("raise SystemExit(1)\n")
    commit(ran, "broken code")
    for number in (1, 2):
        report = verify_round(ran, number, lambda stage, line: None)
        assert report.exit_code == 0, report
        assert verdicts(report) == dict.fromkeys(
            [
                *("data/preferences/preferences.jsonl", "metrics/preferences.json"),
                *("models/policy", "metrics/evaluate.json", "metrics/reward.json"),
                *(f"rounds/{number}/policy", f"rounds/{number}/preferences.jsonl"),
            ],
            "same",
        )
    (ran / "rounds/1/policy/config.json").unlink()  # it may be a link to the cache
    (ran / "rounds/1/policy/config.json").write_text("other weights")
    report = verify_round(ran, 1, lambda stage, line: None)
    assert (report.exit_code, verdicts(report)["rounds/1/policy"]) == (1, "DIFFERS")
    assert verdicts(report)["models/policy"] == "same"
    assert not list((ran / "work/runs").iterdir())
    assert call(ran, "git", "worktree", "list").count("\n") == 1
    monkeypatch.setattr(sys, "argv", ["leash", "verify", "--round", "3"])
    ended = in_process(ran, main)
    assert ended.code == 2
    assert "round 3 is not closed; closed rounds: 2" in ended.stderr


@pytest.mark.slow
def test_lineage_goes_through_closed_rounds_to_their_commits_and_inputs(ran: Path) -> None:
    for number in (1, 2):
        assert "rounds" not in (names(lineage(ran, ran / "models/policy")) if number == 1 else ())
        command.close(ran)
        commit(ran, f"Close round {number}", everything=False)
        repro(ran)
        commit(ran, "a run")
    tree = lineage(ran, ran / "models/policy")
    found = list(walk(tree))
    pairs = "data/preferences/preferences.jsonl"
    assert [(depth, node.path) for depth, node in found] == [
        (0, "models/policy"),
        (1, pairs),
        (2, "input.txt"),
        (2, "rounds"),
        (3, "rounds/2"),
        (4, "rounds/2/policy"),
        (5, pairs),
        (6, "input.txt"),
        (6, "rounds"),
        (7, "rounds/1"),
        (8, "rounds/1/policy"),
        (9, pairs),
        (10, "input.txt"),
        (8, "rounds/1/preferences.jsonl"),
        (9, "input.txt"),
        (4, "rounds/2/preferences.jsonl"),
        (5, "input.txt"),
        (5, "rounds"),
        (6, "rounds/1"),
        (7, "rounds/1/policy"),
        (8, pairs),
        (9, "input.txt"),
        (7, "rounds/1/preferences.jsonl"),
        (8, "input.txt"),
    ]
    by_path = {node.path: node for _, node in found}
    head = read_note(ran, 1)["commit"][:8]
    assert by_path["rounds/1"].notes == (f"round 1, closed at commit {head}; tracked by rounds/1.dvc",)
    assert {node.state for _, node in found if node.path.startswith("rounds/")} == {"as recorded"}
    assert lineage(ran, ran / "rounds/1/policy").path == "rounds/1"
    assert f"dvc.lock of {head}" in show(ran, ran / "models/policy")[1]


def walk(node: Node, depth: int = 0) -> Iterator[tuple[int, Node]]:
    yield depth, node
    for below in node.inputs:
        yield from walk(below, depth + 1)


def names(node: Node) -> list[str]:
    return [below.path for _, below in walk(node)]


def test_the_command_line_has_the_command(ran: Path, leash: Callable[..., "object"]) -> None:
    process = leash(ran, "round", "--list")
    said, _ = process.communicate(timeout=60)  # type: ignore[attr-defined]
    assert said.startswith("the present round is 1")
