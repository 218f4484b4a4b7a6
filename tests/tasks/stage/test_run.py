"""The contract of a stage, on a toy project with one stage: keys, whole outs, changed inputs, locks, signals, exits."""

import errno
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from dvc.repo import Repo
from ruamel.yaml import YAML

from rlhf_core.config.block import Block
from rlhf_core.errors import UserError
from tasks.params.stages import STAGES, params_model
from tasks.stage import gpus as gpu_locks
from tasks.stage.gpus import LOCKS_VARIABLE
from tasks.stage.run import main, require_older_code, run
from tasks.stage.stage import Stage
from tasks.tracking.settings import HOLD_VARIABLE, OUTCOME_VARIABLE

ROOT = Path(__file__).resolve().parents[3]

GRAPH = """
stages:
  toy:
    cmd: python code.py
    deps: [input.txt, code.py, folder]
    params: [toy, seed]
    outs: [out.txt, model]
    metrics: [{metrics/toy.json: {cache: false}}]
"""
PARAMS = "threads: 1\nseed: 1\nlong_rows: refuse\nruntime: {tracking: false}\ntoy: {word: hello}\n"
SLOW = """
import sys, time
from rlhf_core.config.block import Block
from tasks.stage.run import run

class Toy(Block):
    word: str

def execute(stage):
    stage.out("out.txt").write_text("half", encoding="utf-8")
    stage.out("model").mkdir()
    (stage.state_dir / "checkpoint").write_text("kept")
    print("begun", flush=True)
    time.sleep(60)

run("toy", Toy, lambda: execute)
"""


class Toy(Block):
    """The parameters of the toy stage."""

    word: str


class Switched(Toy):
    """The same with a switch."""

    enabled: bool


Ended = Any
Run = Callable[[Callable[[Stage[Toy]], None]], Ended]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A DVC project outside git, with one stage."""
    files = {".dvc/config": "[core]\n    no_scm = true\n    analytics = false\n", "dvc.yaml": GRAPH}
    files |= {"params.yaml": PARAMS, "input.txt": "1\n", "code.py": SLOW, "folder/a": "a\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setenv(OUTCOME_VARIABLE, str(tmp_path / "outcome.jsonl"))
    return tmp_path


@pytest.fixture
def run_toy(toy: Path, in_process: Callable[[Path, Callable[[], object]], Ended]) -> Run:
    return lambda execute: in_process(toy, lambda: run("toy", Toy, lambda: execute))


def write_all(stage: Stage[Toy]) -> None:
    stage.out("out.txt").write_text(stage.params.word, encoding="utf-8")
    stage.out("model").mkdir()
    (stage.out("model") / "weights").write_text(stage.params.word, encoding="utf-8")
    stage.write_metrics({"length": len(stage.params.word)})


def outcome(toy: Path) -> dict[str, Any]:
    printed: dict[str, Any] = json.loads((toy / "outcome.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return printed


def outputs(toy: Path) -> dict[str, str]:
    """The outs, and anything half-written beside them."""
    names = ["out.txt", "model/weights", "metrics/toy.json"]
    found = {name: (toy / name).read_text(encoding="utf-8") for name in names if (toy / name).exists()}
    return found | {path.name: "" for path in toy.rglob("*.partial")}


WHOLE = {"out.txt": "hello", "model/weights": "hello", "metrics/toy.json": '{\n  "length": 5\n}\n'}


def test_a_whole_stage(run_toy: Run, toy: Path) -> None:
    ended = run_toy(write_all)
    assert (ended.code, ended.stderr) == (0, "")
    assert outputs(toy) == WHOLE
    printed = outcome(toy)
    assert printed == {"stage": "toy", "exit": 0, "message": "", "key": printed["key"]}
    assert len(printed["key"]) == 64
    assert not (toy / "work/toy" / printed["key"][:16]).exists(), "resumable state of a finished stage is of no use"


def key_after(run_toy: Run, toy: Path) -> str:
    assert run_toy(write_all).code == 0
    return str(outcome(toy)["key"])


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("input.txt", "1", "2"),
        ("code.py", "half", "whole"),
        ("folder/a", "a", "b"),
        ("params.yaml", "hello", "bye"),
        ("params.yaml", "seed: 1", "seed: 2"),
        ("dvc.yaml", "python code.py", "python -O code.py"),
    ],
)
def test_what_can_change_a_result_changes_the_key(run_toy: Run, toy: Path, file: str, old: str, new: str) -> None:
    before = key_after(run_toy, toy)
    text = (toy / file).read_text(encoding="utf-8")
    (toy / file).write_text(text.replace(old, new), encoding="utf-8")
    changed = key_after(run_toy, toy)
    assert changed != before
    (toy / file).write_text(text, encoding="utf-8")
    assert key_after(run_toy, toy) == before


@pytest.mark.parametrize("addition", ["tracking: false", "tracking: false, checkpoint_every: 3"])
def test_what_cannot_change_a_result_leaves_the_key(run_toy: Run, toy: Path, addition: str) -> None:
    before = key_after(run_toy, toy)
    params = PARAMS.replace("tracking: false", addition).replace("threads: 1", "threads: 2  # not tracked by the toy")
    (toy / "params.yaml").write_text(params + "other: {block: 1}\n", encoding="utf-8")
    (toy / "unrelated.py").write_text("1\n", encoding="utf-8")
    assert key_after(run_toy, toy) == before


def test_a_file_added_to_a_folder_changes_the_key_and_a_cache_of_python_does_not(run_toy: Run, toy: Path) -> None:
    before = key_after(run_toy, toy)
    (toy / ".dvcignore").write_text((ROOT / ".dvcignore").read_text(encoding="utf-8"), encoding="utf-8")
    (toy / "folder/__pycache__").mkdir()
    (toy / "folder/__pycache__/a.pyc").write_text("x", encoding="utf-8")
    assert key_after(run_toy, toy) == before
    (toy / "folder/b").write_text("b\n", encoding="utf-8")
    assert key_after(run_toy, toy) != before


def test_a_crash_leaves_the_old_outs_and_a_traceback(run_toy: Run, toy: Path) -> None:
    run_toy(write_all)

    def crash(stage: Stage[Toy]) -> None:
        stage.out("out.txt").write_text("half", encoding="utf-8")
        stage.out("model").mkdir()
        raise RuntimeError("boom")

    ended = run_toy(crash)
    assert ended.code == 1
    assert "Traceback" in ended.stderr
    assert outputs(toy) == WHOLE
    printed = outcome(toy)
    assert (printed["exit"], printed["message"]) == (1, "RuntimeError: boom")


def test_a_users_error_is_one_line(run_toy: Run, toy: Path) -> None:
    run_toy(write_all)

    def refuse(stage: Stage[Toy]) -> None:
        stage.out("out.txt").write_text("half", encoding="utf-8")
        raise UserError("the input is wrong;\nfix it")

    ended = run_toy(refuse)
    assert (ended.code, ended.stderr) == (2, "toy: the input is wrong; fix it\n")
    assert outputs(toy) == WHOLE
    assert outcome(toy) == {"stage": "toy", "exit": 2, "message": "the input is wrong; fix it", "key": ""}


def test_an_out_that_dvc_yaml_does_not_declare(run_toy: Run, toy: Path) -> None:
    ended = run_toy(lambda stage: stage.outputs.write_json("metrics/other.json", {}))
    assert ended.code == 1
    assert "metrics/other.json is no out of this stage" in ended.stderr
    assert outputs(toy) == {}


def test_an_out_that_was_not_written(run_toy: Run, toy: Path) -> None:
    run_toy(write_all)
    ended = run_toy(lambda stage: stage.write_metrics({"length": 9}))
    assert ended.code == 1
    assert "ended without writing out.txt, model" in ended.stderr
    assert outputs(toy) == WHOLE


def test_a_dataset_that_dvc_yaml_does_not_declare(run_toy: Run) -> None:
    ended = run_toy(lambda stage: stage.read("data/ingest/heldout.jsonl") and None)
    assert ended.code == 1
    assert "no dataset among the dependencies of toy" in ended.stderr


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("input.txt", "2\n", "input.txt"),
        ("folder/a", "changed\n", "folder"),
        ("folder/new", "new\n", "folder"),
        ("code.py", "pass\n", "code.py"),
        ("params.yaml", PARAMS.replace("hello", "bye"), "toy"),
        ("params.yaml", PARAMS.replace("seed: 1", "seed: 2"), "seed"),
    ],
)
def test_an_input_that_changed_meanwhile(run_toy: Run, toy: Path, file: str, text: str, named: str) -> None:
    run_toy(write_all)

    def meddle(stage: Stage[Toy]) -> None:
        write_all(stage)
        (toy / file).write_text(text, encoding="utf-8")

    ended = run_toy(meddle)
    assert ended.code == 2
    assert ended.stderr == f"toy: {named} changed while the stage ran; nothing was recorded, run it again\n"
    assert outputs(toy) == WHOLE


def test_code_that_was_edited_while_it_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.py").write_text("1\n", encoding="utf-8")
    os.utime(tmp_path / "toy.py", (100.0, 100.0))
    monkeypatch.setitem(sys.modules, "toy", SimpleNamespace(__file__=str(tmp_path / "toy.py")))
    require_older_code(tmp_path, 100.0)
    with pytest.raises(UserError, match=r"toy\.py changed while the stage started"):
        require_older_code(tmp_path, 97.0)


def test_a_runtime_parameter_may_change_meanwhile(run_toy: Run, toy: Path) -> None:
    def meddle(stage: Stage[Toy]) -> None:
        write_all(stage)
        (toy / "params.yaml").write_text(PARAMS.replace("tracking: false", "tracking: true"), encoding="utf-8")

    assert run_toy(meddle).code == 0


def test_what_continues_is_recorded_as_resumed(run_toy: Run, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other parameters are another record, which does not show that the stage has begun before."""
    monkeypatch.setenv(HOLD_VARIABLE, "1")

    def interrupted(stage: Stage[Toy]) -> None:
        (stage.state_dir / "checkpoint").touch()
        raise KeyboardInterrupt

    for threads, execute in ((1, interrupted), (2, write_all)):
        text = PARAMS.replace("tracking: false", "tracking: true").replace("threads: 1", f"threads: {threads}")
        (toy / "params.yaml").write_text(text, encoding="utf-8")
        run_toy(execute)
    found = [json.loads(path.read_text()) for path in (toy / "work/tracking").glob("*/toy-*/facts.json")]
    assert {facts["status"]: facts.get("resumed") for facts in found} == {"KILLED": None, "FINISHED": True}


def test_an_input_that_is_missing(run_toy: Run, toy: Path) -> None:
    (toy / "input.txt").unlink()
    ended = run_toy(write_all)
    assert ended.code == 2
    assert ended.stderr.startswith("toy: input.txt: file not found; ")
    assert outputs(toy) == {}


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (PARAMS.replace("word", "wort"), "toy: params.yaml: toy.word: missing parameter"),
        (PARAMS.replace("seed: 1", "seed: -1"), "toy: params.yaml: seed: Input should be greater than"),
        (PARAMS.replace("toy:", "tox:"), "toy: params.yaml: toy.word: missing parameter"),
        ("a: [1\n", "toy: params.yaml: no valid YAML"),
    ],
)
def test_bad_parameters(run_toy: Run, toy: Path, params: str, says: str) -> None:
    run_toy(write_all)
    (toy / "params.yaml").write_text(params, encoding="utf-8")
    ended = run_toy(write_all)
    assert ended.code == 2
    assert ended.stderr.startswith(says)
    assert ended.stderr.count("\n") == 1
    assert outputs(toy) == WHOLE


def native_error(text: str) -> Exception:
    """As safetensors and tokenizers raise it: no OSError, the system's words in the text."""
    return Exception(text)


def wrapped_error() -> Exception:
    """As torch.save raises it: the cause is in the context."""
    try:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "models/sft"),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        native_error("Error while serializing: I/O error: No space left on device (os error 28)"),
        native_error("database or disk is full"),
        wrapped_error(),
    ],
    ids=["write", "quota", "safetensors", "sqlite", "torch"],
)
def test_no_space_left(run_toy: Run, toy: Path, error: Exception) -> None:
    run_toy(write_all)

    def fill(stage: Stage[Toy]) -> None:
        stage.out("out.txt").write_text("half", encoding="utf-8")
        raise error

    ended = run_toy(fill)
    assert ended.code == 2
    assert ended.stderr.startswith("toy: no space left on the device (")
    assert ended.stderr.count("\n") == 1
    assert outputs(toy) == WHOLE


def test_no_space_left_when_the_outs_reach_the_disk(run_toy: Run, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last file does not fit: the first ones must not have been put in place already."""
    run_toy(write_all)
    flushed = 0

    def fsync(descriptor: int) -> None:
        nonlocal flushed
        flushed += 1
        if flushed == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rlhf_core.files.os.fsync", fsync)
    (toy / "params.yaml").write_text(PARAMS.replace("hello", "bye"), encoding="utf-8")
    assert run_toy(write_all).code == 2
    assert outputs(toy) == WHOLE


def test_another_error_of_the_system_is_a_crash(run_toy: Run) -> None:
    def fail(stage: Stage[Toy]) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert run_toy(fail).code == 1


def test_other_versions_than_declared(run_toy: Run, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (toy / "tasks/stage").mkdir(parents=True)
    (toy / "tasks/stage/versions.json").write_text("{}\n", encoding="utf-8")
    (toy / "dvc.yaml").write_text(GRAPH.replace("code.py,", "code.py, tasks/stage/versions.json,"), encoding="utf-8")
    monkeypatch.setattr("tasks.stage.versions.declared", lambda: {"torch": "0.0.1"})
    ended = run_toy(write_all)
    assert ended.code == 2
    assert "is installed, 0.0.1 is declared; run `make setup`" in ended.stderr
    assert outputs(toy) == {}


def test_a_stage_that_does_not_depend_on_versions_runs_with_any(run_toy: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.stage.versions.declared", lambda: {"torch": "0.0.1"})
    assert run_toy(write_all).code == 0


def test_state_survives_a_failure_and_is_found_again(run_toy: Run) -> None:
    found: list[bool] = []

    def once(stage: Stage[Toy]) -> None:
        found.append((stage.state_dir / "checkpoint").exists())
        (stage.state_dir / "checkpoint").write_text("step 3", encoding="utf-8")
        if len(found) == 1:
            raise RuntimeError("boom")
        write_all(stage)

    assert [run_toy(once).code, run_toy(once).code, run_toy(once).code] == [1, 0, 0]
    assert found == [False, True, False]


def test_an_outcome_file_that_cannot_be_written_fails_no_stage(
    run_toy: Run, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OUTCOME_VARIABLE, str(toy / "no/such/folder/outcome.jsonl"))
    assert run_toy(write_all).code == 0
    assert outputs(toy) == WHOLE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_process_is_refused_and_a_signal_leaves_nothing_half_written(
    run_toy: Run, toy: Path, number: signal.Signals
) -> None:
    (toy / "out.txt").write_text("old", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(
        [sys.executable, "code.py"], cwd=toy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "begun\n"
        second = run_toy(write_all)
        assert second.code == 2
        assert f"another process ({first.pid}) runs this stage here" in second.stderr
        assert outputs(toy).keys() == {"out.txt", ".out.txt.partial", ".model.partial"}, "the first one's work is kept"
        first.send_signal(number)
        _, printed = first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == 130
    assert printed == "toy: interrupted; the same command continues\n"
    assert outputs(toy) == {"out.txt": "old"}
    assert outcome(toy) == {
        "stage": "toy",
        "exit": 130,
        "message": "interrupted; the same command continues",
        "key": "",
    }
    checkpoints = [path.read_text(encoding="utf-8") for path in (toy / "work/toy").glob("*/checkpoint")]
    assert checkpoints == ["kept"], "what was trained so far is there for the next attempt"
    assert run_toy(write_all).code == 0


def test_dvc_records_nothing_of_a_run_whose_parameter_changed(
    run_toy: Run, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why the contract compares parameters, too: DVC reads params.yaml again when the command has ended."""
    monkeypatch.chdir(toy)
    (toy / "code.py").write_text(
        "import pathlib\np = pathlib.Path('params.yaml')\np.write_text(p.read_text().replace('hello', 'bye'))\n"
        "for out in ('out.txt', 'model', 'metrics/toy.json'):\n"
        "    pathlib.Path(out).parent.mkdir(exist_ok=True)\n    pathlib.Path(out).write_text('made from hello')\n",
        encoding="utf-8",
    )
    with Repo(str(toy)) as repo:
        repo.reproduce()
    assert "word: bye" in (toy / "dvc.lock").read_text(encoding="utf-8"), "DVC has fixed this: simplify the contract"


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three invented GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path / "locks"))
    yield
    while gpu_locks._held:
        gpu_locks._held.pop().release()


@pytest.mark.usefixtures("gpus")
def test_a_stage_is_imported_when_its_gpus_are_chosen(
    toy: Path, in_process: Callable[[Path, Callable[[], object]], Ended]
) -> None:
    found = []

    def load() -> Callable[[Stage[Toy]], None]:
        found.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return write_all

    assert in_process(toy, lambda: run("toy", Toy, load)).code == 0
    assert found == ["0"]


@pytest.mark.usefixtures("gpus")
def test_a_stage_that_is_switched_off_is_not_imported_and_takes_no_gpu(
    toy: Path, in_process: Callable[[Path, Callable[[], object]], Ended]
) -> None:
    (toy / "dvc.yaml").write_text(GRAPH.replace("out.txt, ", ""), encoding="utf-8")
    (toy / "params.yaml").write_text(PARAMS.replace("word: hello", "word: hello, enabled: false"), encoding="utf-8")
    (toy / "input.txt").write_text("2\n", encoding="utf-8")
    ended = in_process(toy, lambda: run("toy", Switched, lambda: pytest.fail("imported")))
    why = "toy is switched off (toy.enabled is false in params.yaml)"
    assert (ended.code, ended.stdout) == (0, f"[1/1 toy] {why}\n")
    assert json.loads((toy / "metrics/toy.json").read_text(encoding="utf-8")) == {"enabled": False}
    assert (toy / "model/README.md").read_text(encoding="utf-8") == f"There is no model here: {why}.\n"
    assert len(outcome(toy)["key"]) == 64
    assert not (toy / "locks").exists()


def test_without_the_name_of_a_stage_the_stages_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    stages = list(YAML(typ="safe", pure=True).load(ROOT / "dvc.yaml")["stages"])
    for words, says in (([], ""), (["sfd"], "did you mean sft?"), (["sft", "ppo"], "")):
        with pytest.raises(SystemExit) as left:
            main(words)
        printed = capsys.readouterr().err
        assert left.value.code == 2
        assert says in printed
        assert printed.endswith(f"the stages: {', '.join(stages)}\n")


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_its_file_and_its_parameters(stage: str) -> None:
    found = inspect.get_annotations(import_module(f"tasks.{stage}").execute)["stage"]
    assert get_args(found) == (params_model(stage),)


HEAVY = ("torch", "transformers", "mlflow", "pandas", "pandera")


@pytest.mark.parametrize(
    "module", ["tasks.__main__", "tasks.check", "tasks.check_data", "tasks.ingest", "tasks.report"]
)
def test_what_needs_no_model_starts_without_heavy_libraries(module: str) -> None:
    """The runner, and so each stage that is switched off, too."""
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
