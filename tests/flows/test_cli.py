"""`leash`: exit codes, one line on stderr, what is printed, and how quickly it starts."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows import cli, processes, runner
from tasks.tracking.settings import RUN_VARIABLE

Leash = Callable[..., "subprocess.Popen[str]"]


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=100)
    return process.returncode, output, errors


def one_line(errors: str) -> str:
    assert errors.startswith("error: "), errors
    assert errors.count("\n") == 1, errors
    return errors


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, flows.cli; from typer.testing import CliRunner;"
        "assert CliRunner().invoke(flows.cli.app, ['--help']).exit_code == 0;"
        "print([name for name in ('prefect', 'dvc', 'mlflow', 'torch', 'pandas', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "two", "twoo"], "unknown stage twoo; did you mean two?; dvc.yaml has: one, two"),
        (["serve"], "start one with `leash up`"),
        (["import", "nowhere.jsonl"], "nowhere.jsonl"),
        (["plan", "--params", "."], "cannot be read (Is a directory)"),
    ],
)
def test_users_errors_are_one_line(toy: Callable[..., Path], leash: Leash, arguments: list[str], words: str) -> None:
    root = toy({"one": ("work", []), "two": ("work", ["one"])})
    code, _, errors = finish(leash(root, *arguments))
    assert code == 2
    assert words in one_line(errors)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--port", "70000"], "less than or equal to 65535"),
        (["ui", "--port", "0"], "greater than or equal to 1"),
        (["trace", "hello", "--seed", "4294967296"], "less than or equal to 4294967295"),
    ],
)
def test_numbers_out_of_range_are_refused_before_any_work(
    toy: Callable[..., Path], leash: Leash, arguments: list[str], words: str
) -> None:
    code, out, errors = finish(leash(toy({"one": ("work", [])}), *arguments))
    assert (code, out) == (2, "")
    assert "Traceback" not in errors
    assert words in errors


def test_wrong_parameters_have_a_line_each_before_any_server_starts(toy: Callable[..., Path], leash: Leash) -> None:
    """Where the graph has the stage `check`, params.yaml must be Leash's."""
    root = toy({"check": ("work", []), "one": ("work", ["check"])})
    (root / "params.yaml").write_text("seed: -1\n", encoding="utf-8")
    code, out, errors = finish(leash(root, "run"))
    assert (code, out) == (2, "")
    lines = errors.splitlines()
    assert lines[0] == "error: params.yaml: threads: missing parameter; see docs/parameters.md"
    assert [line for line in lines if line.startswith("  seed: ")]
    assert all(line.startswith("  ") for line in lines[1:])


def test_outside_a_project(leash: Leash, tmp_path: Path) -> None:
    code, _, errors = finish(leash(tmp_path, "run"))
    assert code == 2
    assert "no dvc.yaml here or in a folder above" in one_line(errors)


@pytest.mark.parametrize("command", ["run", "serve"])
def test_a_dead_server_is_named(toy: Callable[..., Path], leash: Leash, command: str) -> None:
    code, _, errors = finish(leash(toy({"one": ("work", [])}), command, api="http://127.0.0.1:1/api"))
    assert code == 2
    assert "no Prefect server answers at http://127.0.0.1:1/api" in one_line(errors)


def test_a_schedule_that_is_not_valid(toy: Callable[..., Path], leash: Leash, prefect_api: str) -> None:
    code, _, errors = finish(leash(toy({}), "serve", "--cron", "every night", api=prefect_api))
    assert code == 2
    assert "--cron 'every night'" in one_line(errors)


def test_a_terminal_that_is_not_utf_8_shows_escapes(toy: Callable[..., Path], serial: Callable[[Path], None]) -> None:
    root = toy({"one": ("work", [])})
    (root / "params.yaml").write_text("one: 1\n", encoding="utf-8")
    graph = (root / "dvc.yaml").read_text(encoding="utf-8")
    (root / "dvc.yaml").write_text(f"{graph}    params: [one]\n", encoding="utf-8")
    serial(root)
    (root / "params.yaml").write_text("one: ü\n", encoding="utf-8")
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "flows.cli", "run", "--dry-run"]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"one 1 \u2192 \xfc" in done.stdout


def test_an_isolated_run_names_no_file_of_its_workspace(
    toy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is removed at its end."""
    root = toy({"one": ("work", [])})
    (root / "report").mkdir()
    (root / "report/index.html").touch()
    monkeypatch.chdir(root)
    monkeypatch.setattr(runner, "run", lambda *words, **options: 0)
    for module, name in (
        (processes, "install_signal_handlers"),
        (runner, "quiet_prefect"),
        (cli, "use_own_prefect_home"),
    ):
        monkeypatch.setattr(module, name, lambda: None)
    assert str(root) in CliRunner().invoke(cli.app, ["run"]).output
    monkeypatch.setenv(RUN_VARIABLE, "nightly-1")
    assert CliRunner().invoke(cli.app, ["run"]).output == ""


def test_usage_errors_of_typer(leash: Leash, tmp_path: Path) -> None:
    assert finish(leash(tmp_path, "run", "--fast"))[0] == 2


@pytest.mark.slow
def test_run_from_a_sub_folder(toy: Callable[..., Path], leash: Leash, prefect_api: str) -> None:
    root = toy({"one": ("work", []), "two": ("work", ["one"])})
    (root / "deep" / "er").mkdir(parents=True)
    (root / "models" / "policy").mkdir(parents=True)
    (root / "models" / "policy" / "config.json").touch()
    (root / "models" / "switched_off").mkdir()
    code, output, errors = finish(leash(root / "deep" / "er", "run", api=prefect_api))
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    assert lines[0] == "2 stages, 0 up to date; to run: one, two"
    assert "[1/2 one] starts (not run here yet)" in lines
    assert "[1/2 one] one begins" in lines
    assert [line.split()[:2] for line in lines if line.split()[1:2] == ["ran"]] == [["one", "ran"], ["two", "ran"]]
    assert f"models  {root / 'models'}: policy" in lines
    assert lines[-1].startswith("MLflow  ")


@pytest.mark.slow
def test_a_stages_refusal_is_exit_2_and_a_crash_exit_1(
    toy: Callable[..., Path], leash: Leash, prefect_api: str
) -> None:
    root = toy({"fine": ("work", []), "wrong": ("refuse 'params.yaml: no'", ["fine"]), "after": ("work", ["wrong"])})
    code, output, errors = finish(leash(root, "run", api=prefect_api))
    assert code == 2
    assert one_line(errors) == "error: wrong: params.yaml: no\n"
    assert "failed to reproduce" not in output
    assert output.splitlines()[-1] == "after the correction the same command continues with wrong"
    words = [line.split() for line in output.splitlines()[-5:-2]]
    assert [row[:2] for row in words] == [["fine", "ran"], ["wrong", "FAILED"], ["after", "not"]]
    text = (root / "dvc.yaml").read_text()
    (root / "dvc.yaml").write_text(text.replace("refuse 'params.yaml: no'", "crash 9"))
    code, output, errors = finish(leash(root, "run", "--retries", "1", "--retry-delay", "0", api=prefect_api))
    assert code == 1
    assert "RuntimeError: boom" in one_line(errors)
    assert output.count("[2/3 wrong] wrong begins") == 2
    assert "[2/3 wrong] attempt 2 of 2 after: failed to run: " in output
