"""`leash run --pull` and `--push`: what is fetched, computed and sent, with a folder and with S3 as DVC's remote."""

import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows import isolated, processes, workspace
from flows.pipeline import pipeline
from flows.stages import PipelineFailed
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from tasks.tracking.settings import HOLD_VARIABLE
from tests.conftest import call, commit

GRAPH = """
stages:
  one:
    cmd: python worker.py one work && cat raw.txt >> one.out && grep one params.yaml >> one.out
    deps: [raw.txt]
    params: [one]
    outs: [one.out]
  two:
    cmd: python worker.py two work && mkdir two && cat one.out two.out > two/file && grep two params.yaml >> two/file
    deps: [one.out]
    params: [two]
    outs: [two]
    metrics: [two.json: {cache: false}]
  side:
    cmd: python worker.py side work && cat one.out >> side.out
    deps: [one.out]
    outs: [side.out]
  last:
    cmd: python worker.py last work && cat two/file >> last.out && grep last params.yaml >> last.out
    deps: [two]
    params: [last]
    outs: [last.out]
""".replace("mkdir two &&", "rm -rf two && mkdir two && echo 2 > two.json && grep two params.yaml >> two.json &&")
CHECK = """stages:
  check:
    cmd: touch check.ok
    deps: [params.yaml]
    outs: [check.ok: {cache: false, persist: true}]
"""
STAGES = ("one", "two", "side", "last")


def dvc(root: Path, *words: str) -> str:
    return call(root, sys.executable, "-m", "dvc", *words)


@pytest.fixture
def home(toy: Callable[..., Path], prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A committed project that has not run, with tracked raw data and a folder as its default remote."""
    monkeypatch.setenv(HOLD_VARIABLE, "1")
    root = toy({})
    (root / "dvc.yaml").write_text(GRAPH)
    (root / "params.yaml").write_text("one: 1\ntwo: 1\nlast: 1\n")
    (root / "raw.txt").write_text("raw\n")
    dvc(root, "add", "--quiet", "raw.txt")
    (root.parent / "store").mkdir()
    dvc(root, "remote", "add", "--default", "store", str(root.parent / "store"))
    commit(root)
    return root


def run(root: Path, **options: Any) -> dict[str, str]:
    return {stage: outcome.state for stage, outcome in pipeline(root=str(root), retries=0, **options).items()}


def clone(root: Path, name: str = "clone") -> Path:
    commit(root)
    made = root.parent / name
    call(root.parent, "git", "clone", "--quiet", str(root), str(made))
    return made


def begun(root: Path) -> list[str]:
    """The stages that were executed."""
    log = root / "log.txt"
    return [line.split()[0] for line in log.read_text().splitlines() if " begin " in line] if log.exists() else []


def objects(root: Path) -> set[str]:
    """The objects in its cache, or in a remote."""
    return {path.parent.name + path.name for path in root.rglob("files/md5/*/*")}


def recorded(root: Path) -> dict[str, str]:
    """Output -> its hash in dvc.lock; that of the raw data, too."""
    from tasks.stage.dvc_files import open_project

    with open_project(root) as project:
        outs = (*project.tracked, *(out for stage in project.stages for out in stage.outs))
        return {out.path: str(out.recorded) for out in outs}


def test_a_second_clone_computes_nothing_that_the_remote_has(home: Path) -> None:
    assert run(home, push=True) == dict.fromkeys(STAGES, "Completed")
    second = clone(home)
    assert run(second, pull=True) == dict.fromkeys(STAGES, "Restored")
    assert begun(second) == []
    assert (second / "last.out").read_bytes() == (home / "last.out").read_bytes()
    assert not (second / "raw.txt").exists(), "no stage needs the raw data"
    assert call(second, "git", "diff", "--stat") == "", "dvc.lock is what it was"
    assert run(second, pull=True) == dict.fromkeys(STAGES, "UpToDate")


@pytest.mark.slow
def test_only_the_outputs_of_named_stages_are_fetched(home: Path) -> None:
    run(home, push=True)
    second = clone(home)
    assert run(second, stages=["last"], pull=True) == {"one": "UpToDate", "two": "UpToDate", "last": "Restored"}
    assert objects(second) == {recorded(second)["last.out"]}
    assert not (second / "one.out").exists()


@pytest.mark.slow
def test_one_changed_parameter_computes_what_is_below_it(home: Path) -> None:
    run(home, push=True)
    second = clone(home)
    (second / "params.yaml").write_text("one: 1\ntwo: 1\nlast: 2\n")
    before = recorded(second)
    assert run(second, stages=["last"], pull=True) == {"one": "UpToDate", "two": "Restored", "last": "Completed"}
    assert begun(second) == ["last"]
    inside = objects(second) - {recorded(second)["last.out"], before["two"]}
    assert len(inside) == 1, "the file in the folder two"
    assert before["last.out"] not in objects(second)

    third = clone(home, "third")
    (third / "params.yaml").write_text("one: 1\ntwo: 2\nlast: 1\n")
    states = run(third, pull=True)
    assert states == {"one": "Restored", "two": "Completed", "side": "Restored", "last": "Completed"}
    assert not {before["two"], before["last.out"], before["raw.txt"]} & objects(third)


@pytest.mark.slow
def test_results_of_other_parameters_come_from_the_run_cache_of_the_remote(home: Path) -> None:
    """With metrics that git tracks, which `dvc push` leaves out; below a stage that no run cache holds."""
    graph = GRAPH.replace("deps: [raw.txt]", "deps: [raw.txt, check.ok]").replace("stages:", CHECK)
    (home / "dvc.yaml").write_text(graph)
    commit(home)
    first = (home / "params.yaml").read_text()
    (home / "params.yaml").write_text("one: 2\ntwo: 2\nlast: 2\n")
    run(home, push=True)
    made = {name: (home / name).read_bytes() for name in ("last.out", "two.json")}
    (home / "params.yaml").write_text(first)
    run(home)
    second = clone(home)
    (second / "params.yaml").write_text("one: 2\ntwo: 2\nlast: 2\n")
    assert run(second, pull=True) == {"check": "Completed", **dict.fromkeys(STAGES, "Restored")}
    assert begun(second) == []
    assert {name: (second / name).read_bytes() for name in made} == made


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_the_remote_lacks_is_computed_from_what_it_has(home: Path) -> None:
    run(home, push=True)
    second = clone(home)
    store, hashes = home.parent / "store", recorded(second)
    for name in ("last.out", "two"):
        (store / "files/md5" / hashes[name][:2] / hashes[name][2:]).unlink()
    states = run(second, stages=["last"], pull=True)
    assert states == {"one": "Restored", "two": "Completed", "last": "Completed"}
    assert (second / "last.out").read_bytes() == (home / "last.out").read_bytes()
    shutil.rmtree(store)
    store.mkdir()
    third = clone(home, "third")
    with pytest.raises(UserError, match=r"raw\.txt"):
        run(third, stages=["last"], pull=True)


@pytest.mark.slow
def test_a_lock_file_that_contradicts_itself_is_not_trusted(home: Path) -> None:
    """`two` was made from another `one.out` than dvc.lock has now."""
    run(home, push=True)
    (home / "params.yaml").write_text("one: 5\ntwo: 1\nlast: 1\n")
    run(home, stages=["one"], push=True)
    second = clone(home)
    states = run(second, stages=["last"], pull=True)
    assert states == {"one": "Restored", "two": "Completed", "last": "Completed"}


@pytest.mark.slow
def test_what_ended_well_is_sent_after_a_failure(home: Path) -> None:
    graph = (home / "dvc.yaml").read_text()
    (home / "dvc.yaml").write_text(graph.replace("worker.py last work", "worker.py last refuse no"))
    with pytest.raises(PipelineFailed, match="last: no"):
        run(home, push=True)
    second = clone(home)
    assert run(second, stages=["two", "side"], pull=True) == dict.fromkeys(("one", "two", "side"), "Restored") | {
        "one": "UpToDate"
    }


CHECKED = """
stages:
  check:
    cmd: python worker.py check work && grep two params.yaml > methods.yaml
    deps: [input.txt]
    params: [two]
    outs: [methods.yaml: {cache: false, persist: true}]
  method:
    cmd: python worker.py method work && cat methods.yaml >> method.out
    deps: [input.txt]
    params: [methods.yaml: [two]]
    outs: [method.out]
  last:
    cmd: python worker.py last work && cat method.out >> last.out
    deps: [method.out]
    outs: [last.out]
"""


@pytest.mark.slow
def test_a_stage_that_makes_parameters_for_others(home: Path) -> None:
    """As the stage `check`, whose outputs nobody can fetch, makes data/methods.json."""
    (home / "dvc.yaml").write_text(CHECKED)
    with (home / ".git/info/exclude").open("a") as file:
        file.write("methods.yaml\n")
    run(home, push=True)
    second = clone(home)
    assert run(second, stages=["last"], pull=True) == {"check": "Completed", "method": "Restored", "last": "Restored"}
    (home / "params.yaml").write_text("one: 1\ntwo: 2\nlast: 1\n")
    run(home, stages=["check"], push=True)
    third = clone(home, "third")
    assert run(third, stages=["last"], pull=True) == dict.fromkeys(("check", "method", "last"), "Completed")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_side_by_side_gives_the_same(home: Path) -> None:
    run(home, push=True)
    second = clone(home)
    (second / "params.yaml").write_text("one: 1\ntwo: 3\nlast: 1\n")
    states = run(second, pull=True, jobs=2)
    assert states == {"one": "Restored", "two": "Completed", "side": "Restored", "last": "Completed"}


def test_no_remote_is_refused_before_anything_runs(home: Path) -> None:
    dvc(home, "remote", "default", "--unset")
    for option in ("pull", "push"):
        with pytest.raises(UserError, match="DVC has no default remote; `dvc remote add -d store"):
            run(home, **{option: True})
    dvc(home, "remote", "default", "store")
    (home.parent / "store").rmdir()
    with pytest.raises(UserError, match="no such folder"):
        run(home, pull=True)
    assert begun(home) == []


@pytest.mark.slow
def test_a_push_that_fails_keeps_the_results(home: Path) -> None:
    (home.parent / "store").rmdir()
    (home.parent / "store").touch()
    with pytest.raises(UserError, match=r"DVC's remote .*/store: .*Not a directory.*; the results are kept here"):
        run(home, push=True)
    (home.parent / "store").unlink()
    assert run(home, push=True) == dict.fromkeys(STAGES, "UpToDate")
    assert recorded(home)["last.out"] in objects(home.parent / "store")


@pytest.mark.slow
def test_an_isolated_run_has_the_remote_of_the_checkout(home: Path, prefect_api: str) -> None:
    """Also one of .dvc/config.local, in a clone with an empty cache."""
    run(home, push=True)
    second = clone(home)
    for words in (("remove", "store"), ("add", "--local", "--default", "other", str(home.parent / "store"))):
        dvc(second, "remote", *words)
    commit(second)
    lines: list[str] = []
    space = Workspace(second, "trial", workspace.resolve(second, "HEAD"), ("last=7",))
    with processes.session(), workspace.opened(space, pull=True):
        result = isolated.run(space, lines.append, ["--pull", "--push"], {"PREFECT_API_URL": prefect_api})
    assert result.code == 0, lines
    assert [line.split()[1] for line in lines if line.split()[:1] in (["one"], ["two"], ["side"], ["last"])] == [
        "restored", "restored", "restored", "ran",
    ]  # fmt: skip
    call(second, sys.executable, "-m", "dvc", "exp", "apply", "trial")
    assert recorded(second)["last.out"] in objects(home.parent / "store")


@pytest.fixture
def bucket(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an S3 server whose bucket `leash` is the default remote."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in (keys | {"AWS_EC2_METADATA_DISABLED": "true"}).items():
        monkeypatch.setenv(name, value)
    import boto3

    boto3.client("s3", endpoint_url=url).create_bucket(Bucket="leash")
    dvc(home, "remote", "modify", "store", "url", "s3://leash/dvc")
    dvc(home, "remote", "modify", "store", "endpointurl", url)
    yield url
    check_keys_after(url, b"inf")  # moto's setting outlives its server
    server.stop()


def check_keys_after(url: str, requests: bytes) -> None:
    """How many requests the server at `url` accepts before it checks keys, which it has none of."""
    headers = {"Content-Type": "text/plain"}
    request = urllib.request.Request(f"{url}/moto-api/reset-auth", data=requests, method="POST", headers=headers)
    urllib.request.urlopen(request).close()


SECRET = "the-secret-key"


@pytest.mark.slow
def test_s3_as_the_remote(home: Path, bucket: str) -> None:
    run(home, push=True)
    shutil.rmtree(home.parent / "store")
    second = clone(home)
    assert run(second, stages=["last"], pull=True) == {"one": "UpToDate", "two": "UpToDate", "last": "Restored"}
    assert objects(second) == {recorded(second)["last.out"]}
    (second / "params.yaml").write_text("one: 1\ntwo: 1\nlast: 2\n")
    assert run(second, pull=True, push=True) == dict.fromkeys(STAGES, "Restored") | {"last": "Completed"}
    third = clone(home, "third")
    (third / "params.yaml").write_text("one: 1\ntwo: 1\nlast: 2\n")
    assert run(third, pull=True) == dict.fromkeys(STAGES, "Restored"), "what the second has sent"
    assert SECRET not in "".join(path.read_text() for path in home.parent.rglob(".dvc/config*"))


@pytest.mark.slow
def test_s3_that_refuses(home: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(home, stages=["one"], push=True)
    second = clone(home)
    check_keys_after(bucket, b"0")
    with pytest.raises(UserError, match="Forbidden") as refused:
        run(second, stages=["one"], pull=True)
    assert SECRET not in str(refused.value)
    with pytest.raises(
        UserError, match=r"InvalidAccessKeyId.*; the results are kept here, and the same command sends them"
    ):
        run(home, stages=["one", "two"], push=True)
    assert begun(home) == ["one", "two"]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(UserError, match="Unable to locate credentials"):
        run(second, stages=["one"], pull=True)
    assert begun(second) == []
