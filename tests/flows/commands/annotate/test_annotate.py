"""`leash annotate` as a command: options, sessions, and a server that is stopped, killed and started again."""

import json
import signal
import socket
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.commands.annotate import annotate as module
from flows.commands.annotate.annotate import Call, annotate, database, export_labels
from flows.commands.annotate.server import hash_token
from flows.commands.annotate.store import Store
from flows.commands.annotate.tasks import SAMPLES
from rlhf_core.errors import UserError
from rlhf_core.locks import held
from tests.flows.commands.annotate.conftest import Served, write_questions, write_rows

LOOPBACK = "127.0.0.1"


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """The options of a session of six pairs."""
    return Call(
        source=write_questions(tmp_path / "own.jsonl", 6), model=None, answers=2, pairs=6, ask="random", rewards=(),
        overlap=1, gold=None, gold_every=10, guidelines=None, share=False, annotators=("anna",), port=0, name="labels",
        seed=1,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _served_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of a call in this process ends at once, as after Ctrl-C."""
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)


def refused(root: Path, call: Call) -> str:
    with pytest.raises(UserError) as caught:
        annotate(root, call)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_samples_the_message_names_both_ways(tmp_path: Path, call: Call) -> None:
    text = refused(tmp_path, replace(call, source=None))
    assert text == (
        f"{tmp_path / 'data/preferences/samples.jsonl'}: not found; run `leash run preferences` first, or name a file "
        "with --from"
    )
    assert not database(tmp_path, "labels").exists(), "the same command works when the file is there"


def test_empty_samples_name_the_parameter_that_makes_some(tmp_path: Path, call: Call) -> None:
    (tmp_path / SAMPLES).parent.mkdir(parents=True)
    (tmp_path / SAMPLES).touch()
    text = refused(tmp_path, replace(call, source=None))
    assert "empty, because preferences.source: dataset makes no samples" in text
    assert "--model models/policy" in text
    assert text.endswith("or name a file with --from")


def test_a_project_that_was_moved_continues(tmp_path: Path, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    write_questions(old / "own.jsonl", 6)
    gold = write_rows(old / "gold.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    annotate(old, replace(call, source=old / "own.jsonl", gold=gold))
    old.rename(new)
    annotate(new, replace(call, source=new / "own.jsonl", gold=new / "gold.jsonl"))
    text = capsys.readouterr().out
    assert "continues: " in text
    assert "has changed" not in text


@pytest.mark.parametrize("error", [KeyError("uid"), OSError("no user")])
def test_a_user_without_a_name_is_one_line(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def nobody() -> str:
        raise error

    monkeypatch.setattr("getpass.getuser", nobody)
    assert "name yourself: --annotators" in refused(tmp_path, replace(call, annotators=()))


def test_the_next_commands_of_an_export(tmp_path: Path, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    annotate(tmp_path, call)
    store = Store(database(tmp_path, "labels"))
    one = store.view("anna", 1.0).task
    assert one is not None
    store.judge("anna", one.id, "tie", [], 2.0)
    store.close()
    path = tmp_path / "my labels.jsonl"
    export_labels(tmp_path, "labels", path)
    assert capsys.readouterr().out.splitlines()[-5:] == [
        "next:",
        f"  leash import '{path}'",
        '  set in params.yaml: ingest.labels: "my labels.jsonl"',
        "  and preferences.source: both (the demo: with the simulated annotators' pairs) or dataset (people only)",
        "  leash run",
    ]
    raw = tmp_path / "data" / "raw"
    raw.mkdir(parents=True)
    (raw / path.name).touch()
    export_labels(tmp_path, "labels", path)
    assert f"  leash import '{path}' --force\n" in capsys.readouterr().out


def test_the_samples_of_the_last_run_are_the_default(
    tmp_path: Path, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "question"}]
    rows = [{"prompt_id": "q", "prompt": turns, "sample": i, "response": f"a{i}", "ended": True} for i in range(4)]
    (tmp_path / SAMPLES).parent.mkdir(parents=True)
    write_rows(tmp_path / SAMPLES, rows)
    gold = write_rows(tmp_path / "gold.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    annotate(tmp_path, replace(call, source=None, pairs=5, gold=gold))
    assert "0 of 5 labels done; 5 tasks, gold questions: 1" in capsys.readouterr().out
    tasks = list(Store(database(tmp_path, "labels")).tasks.values())
    assert [task.right for task in tasks] == [None] * 5 + [0]
    assert all(task.prompt == turns for task in tasks[:5])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answers": 3}, "--answers 3: choose 2 to compare or 4 to rank"),
        ({"overlap": 2}, "--overlap 2 needs as many annotators, and there are 1"),
        ({"share": True, "annotators": ()}, "--share needs the names"),
        ({"annotators": ("anna", "anna")}, "a name occurs twice"),
        ({"annotators": ("an\nna",)}, "printable characters"),
        ({"annotators": ("a" * 41,)}, "at most 40"),
        ({"name": "../labels"}, "--name ../labels: use letters"),
        ({"name": ""}, "--name : use letters"),
        ({"guidelines": Path("/nowhere.md")}, "--guidelines /nowhere.md: cannot be read"),
        ({"gold": Path("/nowhere.jsonl")}, "/nowhere.jsonl: file not found"),
        ({"source": Path("/nowhere.jsonl")}, "/nowhere.jsonl: not found"),
    ],
)
def test_wrong_options_are_one_line(tmp_path: Path, call: Call, change: dict[str, object], words: str) -> None:
    assert words in refused(tmp_path, replace(call, **change))  # type: ignore[arg-type]


def test_the_task_set_is_stored_once_and_the_same_command_continues(
    tmp_path: Path, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    annotate(tmp_path, call)
    store = Store(database(tmp_path, "labels"))
    tasks = store.tasks
    assert len(tasks) == 6
    assert "new session: work/annotate/labels.db\n" in capsys.readouterr().out
    annotate(tmp_path, replace(call, annotators=("ben",), guidelines=None))
    text = capsys.readouterr().out
    assert "continues: " in text
    assert "has changed" not in text
    assert call.source is not None
    write_questions(call.source, 9)
    annotate(tmp_path, call)
    assert "own.jsonl has changed since; the tasks are still the old ones" in capsys.readouterr().out
    assert store.tasks == tasks


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pairs": 5}, "--pairs 6, not 5"),
        ({"answers": 4}, "--answers 2, not 4"),
        ({"seed": 2}, "--seed 1, not 2"),
        ({"gold_every": 3}, "--gold-every 10, not 3"),
        ({"ask": "margin"}, "--ask random, not margin"),
        ({"overlap": 2, "annotators": ("anna", "ben")}, "--overlap 1, not 2"),
        ({"source": None}, "samples.jsonl; give the same options, or another --name"),
    ],
)
def test_other_settings_for_a_session_are_refused(
    tmp_path: Path, call: Call, change: dict[str, object], words: str
) -> None:
    annotate(tmp_path, call)
    assert words in refused(tmp_path, replace(call, **change))  # type: ignore[arg-type]
    annotate(tmp_path, replace(call, name="another", **change)) if "source" not in change and "ask" not in change else 0


def test_a_port_in_use_is_one_line_and_stores_nothing(tmp_path: Path, call: Call) -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} cannot be used (Address already in use)" in refused(tmp_path, replace(call, port=port))
    assert not database(tmp_path, "labels").exists()


def test_a_session_is_served_by_one_process(tmp_path: Path, call: Call) -> None:
    with held(database(tmp_path, "labels").with_suffix(".lock"), 0.0, "has it"):
        assert "serves this session" in refused(tmp_path, call)
    annotate(tmp_path, call)


def test_shared_annotators_get_an_address_each(tmp_path: Path, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    annotate(tmp_path, replace(call, share=True, annotators=("anna", "ben"), overlap=2))
    lines = [line for line in capsys.readouterr().out.splitlines() if "?token=" in line]
    assert [line.split(":")[0] for line in lines] == ["anna", "ben"]
    tokens = [parse_qs(urlsplit(line.split(": ")[1]).query)["token"][0] for line in lines]
    assert len(set(tokens)) == 2
    assert all(len(token) >= 32 for token in tokens)


@pytest.mark.parametrize("share", [False, True])
def test_the_socket_is_of_this_machine_only_unless_shared(call: Call, share: bool) -> None:
    with module.listening(replace(call, share=share)) as listener:
        assert listener.getsockname()[0] == ("0.0.0.0" if share else LOOPBACK)


def test_export_without_a_session_or_labels_is_one_line(tmp_path: Path, call: Call) -> None:
    with pytest.raises(UserError, match=r"labels.db: no such session \(there are: none\); start one: leash annotate$"):
        export_labels(tmp_path, "labels", tmp_path / "labels.jsonl")
    annotate(tmp_path, replace(call, name="monday"))
    with pytest.raises(UserError, match=r"there are: monday\); start one: leash annotate --name labels2"):
        export_labels(tmp_path, "labels2", tmp_path / "labels.jsonl")
    with pytest.raises(UserError, match="no labels yet"):
        export_labels(tmp_path, "monday", tmp_path / "labels.jsonl")
    assert not (tmp_path / "labels.jsonl").exists()


def test_options_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flows.processes.install_signal_handlers", lambda: None)
    calls: list[Call] = []
    monkeypatch.setattr(module, "annotate", lambda root, call: calls.append(call))
    words = "annotate --from own.jsonl --answers 4 --pairs 30 --ask disagreement --reward a --reward b --overlap 2 "
    words += (
        "--gold g.jsonl --gold-every 5 --guidelines g.md --share --annotators anna,ben --port 9000 --name x --seed 7"
    )
    assert CliRunner().invoke(app, words.split()).exit_code == 0
    assert CliRunner().invoke(app, ["annotate"]).exit_code == 0
    assert CliRunner().invoke(app, ["annotate", "--model", "models/policy"]).exit_code == 0
    here = Path.cwd()
    assert calls[0] == Call(
        here / "own.jsonl", None, 4, 30, "disagreement", (here / "a", here / "b"), 2, here / "g.jsonl", 5,
        here / "g.md", True, ("anna", "ben"), 9000, "x", 7,
    )  # fmt: skip
    assert calls[1] == Call(
        None, None, 2, 200, "random", (here / "models/reward",), 1, None, 10, None, False, (), 8765, "labels", 1
    )
    assert calls[2] == replace(calls[1], model=here / "models/policy")


class Person:
    """An annotator without a browser."""

    def __init__(self, address: str) -> None:
        token = parse_qs(urlsplit(address).query)["token"][0]
        host = f"http://{urlsplit(address).netloc}"
        self.client = httpx.Client(base_url=host, headers={"Authorization": f"Bearer {token}"}, timeout=30)

    def view(self) -> dict[str, object]:
        return dict(self.client.get("/api/view").raise_for_status().json())

    def judge(self, task: str, ranking: list[int]) -> dict[str, object]:
        choice = {"task": task, "action": "rank", "ranking": ranking}
        return dict(self.client.post("/api/judge", json=choice).raise_for_status().json())


@pytest.mark.slow
def test_a_killed_server_loses_nothing_and_the_same_command_continues(served: Served, tmp_path: Path) -> None:
    source = write_questions(tmp_path / "own.jsonl", 4)
    options = ["--from", str(source), "--pairs", "4", "--annotators", "anna"]
    first = served.start(*options)["anna"]
    assert served.process is not None
    at = {c.laddr for c in psutil.Process(served.process.pid).net_connections("inet") if c.status == "LISTEN"}
    assert at == {(LOOPBACK, served.port)}
    anna = Person(first)
    chosen: dict[str, list[int]] = {}
    for ranking in ([0, 1], [1, 0]):
        chosen[str(anna.view()["task"]["id"])] = ranking  # type: ignore[index]
        anna.judge(list(chosen)[-1], ranking)
    open_task = anna.view()["task"]["id"]  # type: ignore[index]
    (token,) = parse_qs(urlsplit(first).query)["token"]
    stored = b"".join(path.read_bytes() for path in (served.root / "work" / "annotate").glob("labels.db*"))
    assert hash_token(token).encode() in stored
    assert token.encode() not in stored
    served.stop(signal.SIGKILL)
    second = served.start(*options)["anna"]
    assert second != first
    for address in (first, second):
        view = Person(address).view()
        assert (view["done"], view["task"]["id"]) == (2, open_task)  # type: ignore[index]
    printed = served.stop(signal.SIGINT)
    assert "2 of 4 labels done" in printed
    assert printed.splitlines()[-1] == "export: leash annotate --export labels.jsonl"
    assert served.process.returncode == 0
    assert "Traceback" not in printed
    done = served.command("--export", str(tmp_path / "labels.jsonl"))
    assert done.returncode == 0, done.stderr
    assert f"next:\n  leash import {tmp_path / 'labels.jsonl'}\n" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["task"]: row["order"] for row in rows} == {
        task: [place + 1 for place in ranking] for task, ranking in chosen.items()
    }


@pytest.mark.slow
def test_refusals_of_the_command_have_exit_code_2(served: Served, tmp_path: Path) -> None:
    done = served.command()
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "leash run preferences" in done.stderr
    source = write_rows(tmp_path / "own.jsonl", [{"prompt": "p", "responses": ["a", "a"]}])
    done = served.command("--from", str(source), "--port", str(served.port))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no prompt has two different answers" in done.stderr


@pytest.mark.slow
def test_without_names_the_user_of_the_machine_labels(served: Served, tmp_path: Path) -> None:
    source = write_questions(tmp_path / "own.jsonl", 2)
    assert list(served.start("--from", str(source))) == ["owner"]
    assert "error: stopped; nothing is left running" in served.stop(signal.SIGTERM).splitlines()
    assert served.process is not None
    assert served.process.returncode == 143
