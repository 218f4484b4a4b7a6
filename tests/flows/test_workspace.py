"""Isolated workspaces: what is in one, that it continues after a kill, and that the checkout stays as it is."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import isolated, processes, workspace
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from tasks.records.recorded import read_results
from tests.conftest import call, commit

Toy = Callable[..., Path]


@pytest.fixture
def home(toy: Toy) -> Path:
    """A committed project of two stages that has not run."""
    root = toy({"one": ("work", []), "two": ("work", ["one"])})
    (root / "params.yaml").write_text("a:\n  b: 1  # kept\nseed: 1\n")
    commit(root)
    return root


def space(home: Path, name: str = "trial", *overrides: str) -> Workspace:
    return Workspace(home, name, workspace.resolve(home, "HEAD"), overrides)


def test_it_has_the_commit_and_the_overrides_and_not_the_edits(home: Path) -> None:
    (home / "input.txt").write_text("an edit\n")
    status = call(home, "git", "status", "--porcelain")
    with workspace.opened(space(home, "trial", "a.b=2")) as made:
        assert (made.root / "input.txt").read_text() == "1\n"
        assert (made.root / "params.yaml").read_text() == "a:\n  b: 2  # kept\nseed: 1\n"
        assert call(home, "git", "status", "--porcelain") == status
    workspace.remove(made)
    assert not made.folder.exists()
    assert call(home, "git", "worktree", "list").count("\n") == 1


def test_it_shares_the_cache_but_not_the_state(home: Path) -> None:
    call(home, sys.executable, "-m", "dvc", "repro")
    commit(home)
    with workspace.opened(space(home)) as made:
        printed = call(made.root, sys.executable, "-m", "dvc", "repro")
        assert "Stage 'one' is cached - skipping run, checking out outputs" in printed
        assert (made.root / "one.out").read_text() == "one1\n"
        assert not (made.root / "log.txt").exists()


def test_a_workspace_left_behind_continues_and_another_commit_starts_again(home: Path) -> None:
    with workspace.opened(space(home)) as made:
        (made.root / "progress").touch()
    with workspace.opened(space(home)) as made:
        assert (made.root / "progress").exists()
    with workspace.opened(space(home, "trial", "seed=2")) as made:
        assert not (made.root / "progress").exists(), "other overrides"
        (made.root / "progress").touch()
    (home / "input.txt").write_text("2\n")
    commit(home)
    with workspace.opened(space(home, "trial", "seed=2")) as made:
        assert not (made.root / "progress").exists(), "another commit"


def test_a_half_made_workspace_is_made_again(home: Path) -> None:
    with workspace.opened(space(home)) as made:
        (made.folder / workspace.NOTE).unlink()
        (made.root / "input.txt").unlink()
    with workspace.opened(space(home)) as made:
        assert (made.root / "input.txt").exists()


def test_one_process_at_a_time(home: Path) -> None:
    with workspace.opened(space(home)):
        assert [pid for _, pid in workspace.found(home)] == [os.getpid()]
        with (
            pytest.raises(UserError, match=f"process {os.getpid()} works in .*trial; wait"),
            workspace.opened(space(home)),
        ):
            pass
    assert [pid for _, pid in workspace.found(home)] == [None]


def test_several_are_made_at_the_same_time(home: Path) -> None:
    made: list[Path] = []

    def make(number: int) -> None:
        with workspace.opened(space(home, f"trial-{number}", f"seed={number}")) as one:
            made.append(one.root)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 6
    assert sorted(path.joinpath("params.yaml").read_text()[-2:] for path in made) == [f"{n}\n" for n in range(6)]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("a.b=(", "-S a.b=(: "),
    ],
)
def test_an_override_that_does_not_fit_is_refused(home: Path, override: str, says: str) -> None:
    with pytest.raises(UserError) as refused, workspace.opened(space(home, "trial", override)):
        pass
    assert str(refused.value).startswith(says)


def test_tracked_raw_data_come_from_the_cache(home: Path) -> None:
    (home / "raw.txt").write_text("raw\n")
    call(home, sys.executable, "-m", "dvc", "add", "--quiet", "raw.txt")
    commit(home)
    with workspace.opened(space(home)) as made:
        assert (made.root / "raw.txt").read_text() == "raw\n"
    cached = next(path for path in (home / ".dvc/cache/files").rglob("*") if path.is_file())
    cached.unlink()
    with (
        pytest.raises(UserError, match=r"raw.txt.dvc: DVC's cache does not hold these data"),
        workspace.opened(space(home, "without")),
    ):
        pass
    with workspace.opened(space(home, "bare"), raw_data=False) as made:
        assert (made.root / "raw.txt.dvc").exists()


def test_a_relative_remote_is_the_same_folder(home: Path) -> None:
    call(home, sys.executable, "-m", "dvc", "remote", "add", "--default", "store", "../../store")
    commit(home)
    with workspace.opened(space(home)) as made:
        listed = call(made.root, sys.executable, "-m", "dvc", "remote", "list")
    assert listed.split()[:2] == ["store", str((home / "../../store").resolve())]


def test_keys_of_the_user_are_not_copied(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has configured for all projects is there anyway; keys of the project are for the user alone."""
    monkeypatch.setenv("DVC_GLOBAL_CONFIG_DIR", str(tmp_path / "global"))
    for level, name in (("--global", "others"), ("--local", "own")):
        call(home, sys.executable, "-m", "dvc", "remote", "add", level, name, "s3://a/b")
        call(home, sys.executable, "-m", "dvc", "remote", "modify", level, name, "secret_access_key", f"key of {name}")
    with workspace.opened(space(home)) as made:
        config = made.root / ".dvc/config.local"
        assert "key of own" in config.read_text()
        assert "others" not in config.read_text()
        assert config.stat().st_mode & 0o777 == 0o600
        assert "others" in call(made.root, sys.executable, "-m", "dvc", "remote", "list")


def test_another_worktree_on_a_disk_that_is_away_stays_known(home: Path, tmp_path: Path) -> None:
    call(home, "git", "worktree", "add", "--quiet", "--detach", str(tmp_path / "mine"))
    (tmp_path / "mine").rename(tmp_path / "away")
    with workspace.opened(space(home)) as made:
        pass
    workspace.remove(made)
    assert str(tmp_path / "mine") in call(home, "git", "worktree", "list")
    assert str(made.root) not in call(home, "git", "worktree", "list")


def test_credentials_of_git_stay_in_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIT_ASKPASS", "GIT_CONFIG_COUNT", "GIT_SSH_COMMAND", "GIT_DIR", "GIT_INDEX_FILE"):
        monkeypatch.setenv(name, "0")
    changes = workspace.environment(home)
    assert {"GIT_ASKPASS", "GIT_CONFIG_COUNT", "GIT_SSH_COMMAND"}.isdisjoint(changes)
    assert (changes["GIT_DIR"], changes["GIT_INDEX_FILE"]) == (None, None)
    assert workspace.resolve(home, "HEAD")


def test_no_commit_no_repository_and_no_hooks(tmp_path: Path, home: Path) -> None:
    with pytest.raises(UserError, match=r"git knows no commit 'HEAD'; commit the project"):
        workspace.resolve(tmp_path, "HEAD")
    hook = home / ".git/hooks/post-checkout"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    with workspace.opened(space(home)):
        pass


@pytest.mark.parametrize(("text", "name"), [("a b/c..d", "a-b-c.d"), ("coef=0.1", "coef=0.1"), ("-x-", "x")])
def test_names(text: str, name: str) -> None:
    assert isolated.as_name(text) == name
    assert subprocess.run(["git", "check-ref-format", f"refs/exps/ab/cd/{name}"], check=False).returncode == 0


def test_what_cannot_be_a_name() -> None:
    with pytest.raises(UserError, match="cannot be a name"):
        isolated.as_name("///")


@pytest.mark.slow
def test_a_run_becomes_an_experiment_and_leaves_no_workspace(home: Path, prefect_api: str) -> None:
    """`dvc exp show`, `apply` and `branch` work on it, with no author in git's configuration."""
    variables = {"PREFECT_API_URL": prefect_api}
    with processes.session(), workspace.opened(space(home, "t1", "a.b=5")) as made:
        result = isolated.run(made, lambda line: None, variables=variables)
    assert (result.code, result.error) == (0, "")
    assert not made.folder.exists()
    found = isolated.find(home, made.commit, "t1")
    assert found is not None
    assert read_results(home, found, "metrics", "params.yaml") == {"params.yaml": b"a:\n  b: 5  # kept\nseed: 1\n"}
    assert isolated.seconds_of(home, found) == pytest.approx(result.seconds, abs=0.1)
    assert "MLflow run: t1" in call(home, "git", "log", "-1", "--format=%B", found)
    assert "t1" in call(home, sys.executable, "-m", "dvc", "exp", "list")
    call(home, sys.executable, "-m", "dvc", "exp", "branch", "t1", "kept")
    call(home, sys.executable, "-m", "dvc", "exp", "apply", "t1")
    assert (home / "two.out").read_text() == "two1\n"
    assert not (home / "log.txt").exists(), "restored from the cache, not run"


@pytest.mark.slow
def test_a_run_that_fails_stays_and_says_where(toy: Toy, prefect_api: str) -> None:
    root = toy({"one": ("refuse wrong", [])})
    (root / "params.yaml").write_text("a: 1\n")
    commit(root)
    with processes.session(), workspace.opened(space(root)) as made:
        result = isolated.run(made, lambda line: None, variables={"PREFECT_API_URL": prefect_api})
    assert (result.code, result.error) == (2, "one: wrong")
    assert made.root.exists()
    assert workspace.why_kept(made.folder) == "one: wrong"
    assert isolated.find(root, made.commit, "trial") is None
