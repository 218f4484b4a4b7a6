"""`leash serve`: the schedule runs a branch's commit in a workspace of its own, whatever the checkout holds."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from flows import isolated, workspace
from flows.deployments import workspace_of
from flows.server import _free_port
from rlhf_core.errors import UserError
from tests.conftest import ROOT, call, commit
from tests.faults.conftest import until

Toy = Callable[..., Path]
SECONDS = 240.0


@pytest.fixture
def home(toy: Toy) -> Path:
    """A committed project of one stage, with an edit that is not committed."""
    root = toy({"one": ("work", [])})
    (root / "params.yaml").write_text("a: 1\n")
    commit(root)
    (root / "input.txt").write_text("an edit\n")
    return root


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect's runner looks each second for runs to start, and not every ten."""
    monkeypatch.setenv("PREFECT_RUNNER_POLL_FREQUENCY", "1")


def test_the_name_tells_settings_apart(home: Path) -> None:
    first = workspace_of(home, "HEAD", [])
    assert first.name == f"nightly-{first.commit[:8]}"
    assert workspace_of(home, "HEAD", ["a=2"]).name.startswith(f"{first.name}-")
    assert workspace_of(home, "HEAD", ["a=2"]).name != workspace_of(home, "HEAD", ["a=3"]).name
    with pytest.raises(UserError, match="git knows no commit 'absent'"):
        workspace_of(home, "absent", [])


def test_a_branch_of_a_remote_is_fetched(home: Path, tmp_path: Path) -> None:
    call(tmp_path, "git", "clone", "--quiet", str(home), "second")
    second = tmp_path / "second"
    branch = call(home, "git", "branch", "--show-current").strip()
    before = workspace.resolve(second, f"origin/{branch}")
    commit(home)
    workspace.fetch(second, f"origin/{branch}")
    assert workspace.resolve(second, f"origin/{branch}") == workspace.resolve(home, "HEAD") != before
    workspace.fetch(second, "a/local/branch")


@pytest.mark.parametrize("name", ["--upload-pack=touch found; git-upload-pack", "+main:refs/heads/mine", "a b"])
def test_the_name_of_a_branch_is_no_option_of_git(home: Path, tmp_path: Path, name: str) -> None:
    call(tmp_path, "git", "clone", "--quiet", str(home), "second")
    before = call(tmp_path / "second", "git", "for-each-ref")
    with pytest.raises(UserError, match="git "):
        workspace.fetch(tmp_path / "second", f"origin/{name}")
    assert call(tmp_path / "second", "git", "for-each-ref") == before
    assert not list(tmp_path.rglob("found"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_documented_systemd_units_are_valid(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/nightly.md").read_text(encoding="utf-8")
    units = re.findall(r"user/(leash[\w-]*\.service)`:\n\n((?:    .*\n|\n)+)", page)
    assert [name for name, _ in units] == ["leash-server.service", "leash.service"]
    program = tmp_path / ".venv/bin/leash"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    for name, text in units:
        (tmp_path / name).write_text(textwrap.dedent(text).replace("/home/me/leash", str(tmp_path)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", *(f"./{name}" for name, _ in units)],
        cwd=tmp_path, env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("quick_polls")
def test_the_clock_starts_a_run_of_the_commit(home: Path, leash: Callable[..., "subprocess.Popen[str]"]) -> None:
    """The edit is neither used nor touched, and the run is a DVC experiment of the commit."""
    printed, _ = leash(home, "up", "--port", str(_free_port())).communicate(timeout=150)  # the shared one has no clock
    assert "Prefect server: " in printed
    head = workspace.resolve(home, "HEAD")
    status = call(home, "git", "status", "--porcelain")
    process = leash(home, "serve", "--cron", "* * * * *")
    try:
        until(lambda: isolated.find(home, head, f"nightly-{head[:8]}") is not None, seconds=SECONDS)
        until(lambda: not (home / f"work/runs/nightly-{head[:8]}").exists())
    finally:
        process.terminate()
        printed, _ = process.communicate(timeout=60)
        leash(home, "up", "--stop").communicate(timeout=60)
    found = isolated.find(home, head, f"nightly-{head[:8]}")
    assert found is not None
    recorded = call(home, "git", "show", f"{found}:dvc.lock")
    assert hashlib.md5(b"1\n").hexdigest() in recorded, "the committed input"
    assert call(home, "git", "status", "--porcelain") == status
    assert (home / "input.txt").read_text() == "an edit\n"
    assert f"(now {head[:12]})" in printed


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("quick_polls")
def test_two_settings_run_at_the_same_time(
    toy: Toy, leash: Callable[..., "subprocess.Popen[str]"], prefect_api: str
) -> None:
    from prefect.deployments import run_deployment

    root = toy({"one": ("wait", [])})
    (root / "params.yaml").write_text("a: 1\n")
    (root / "dvc.yaml").write_text((root / "dvc.yaml").read_text().replace("    deps:", "    params: [a]\n    deps:"))
    commit(root)
    process = leash(root, "serve", "--limit", "2", api=prefect_api)
    try:
        until(lambda: deployment_exists("toy-nightly/leash"))
        for overrides in (["a=2"], ["a=3"]):
            values = {"branch": "HEAD", "overrides": overrides}
            run_deployment("toy-nightly/leash", parameters=values, timeout=0)
        until(lambda: len(list((root / "work/runs").glob("nightly-*/tree/log.txt"))) == 2, seconds=SECONDS)
        for tree in (root / "work/runs").glob("nightly-*/tree"):
            (tree / "go").touch()
        until(lambda: not list((root / "work/runs").glob("nightly-*")), seconds=SECONDS)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    params = [call(root, "git", "show", f"{one}:params.yaml") for one in experiments(root)]
    assert sorted(params) == ["a: 2\n", "a: 3\n"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("quick_polls")
def test_new_data_in_the_branch_start_a_run(
    toy: Toy, leash: Callable[..., "subprocess.Popen[str]"], prefect_api: str
) -> None:
    root = toy({"one": ("work", [])})
    (root / "params.yaml").write_text("a: 1\n")
    (root / "data.txt").write_text("1\n")
    call(root, sys.executable, "-m", "dvc", "add", "--quiet", "data.txt")
    commit(root)
    process = leash(root, "serve", "--watch", "1", "--branch", "HEAD", api=prefect_api)
    try:
        assert process.stdout is not None
        while "each run takes" not in (line := process.stdout.readline()):
            assert line
        until(lambda: deployment_exists("toy-nightly/leash"))
        time.sleep(3.0)  # it has looked at the data, each second
        (root / "input.txt").write_text("other code is no other data\n")
        commit(root)
        time.sleep(5.0)
        (root / "data.txt").write_text("2\n")
        call(root, sys.executable, "-m", "dvc", "add", "--quiet", "data.txt")
        commit(root)
        head = workspace.resolve(root, "HEAD")
        until(lambda: isolated.find(root, head, f"nightly-{head[:8]}") is not None, seconds=SECONDS)
    finally:
        process.terminate()
        printed, _ = process.communicate(timeout=60)
    assert printed.count("the data of HEAD have changed") == 1
    assert f"starting a run of {head[:12]}" in printed
    assert [name.rpartition("/")[2] for name in experiments(root)] == [f"nightly-{head[:8]}"]


def deployment_exists(name: str) -> bool:
    from prefect import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        return client.read_deployment_by_name(name) is not None
    return False


def experiments(root: Path) -> list[str]:
    listed = call(root, "git", "for-each-ref", "--format=%(refname)", "refs/exps")
    return [name for name in listed.split() if "/nightly-" in name]
