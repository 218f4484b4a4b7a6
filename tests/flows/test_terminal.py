"""Live lines and the closing table."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import terminal
from flows.artifacts import metric_rows, report_page
from flows.stages import EXECUTED, FAILED, NOT_RUN, UP_TO_DATE, Outcome
from tests.conftest import call, commit


def test_nothing_is_printed_before_the_screen_opens_and_no_advice_of_dvc(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_line("sft", "step 1/3")
    assert capsys.readouterr().out == ""
    with terminal.screen(["base", "sft"]):
        terminal.print_line("", "up to 1 of 2 stages to run: sft")
        terminal.print_line("sft", "[4/17 sft] step 2/3  loss 1.2")
        terminal.print_line("sft", "Use `dvc push` to send your updates to remote storage.")
        terminal.print_line("sft", "> python -m tasks sft")
        terminal.print_line("sft", "")
        terminal.end(Outcome("sft", EXECUTED, 61.27))
        terminal.end(Outcome("base", UP_TO_DATE, 0.0))
    assert capsys.readouterr().out.splitlines() == [
        "up to 1 of 2 stages to run: sft",
        "[2/2 sft] step 2/3  loss 1.2",
        "[2/2 sft] ran in 1 min 01 s",
    ]
    table = terminal.closing_table().splitlines()
    assert [line.split()[0] for line in table[:-1]] == ["stage", "base", "sft"]
    assert table[-1] == "in all: 1 ran in 1 min 01 s, 1 up to date"


def test_a_terminal_has_one_live_line_a_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with terminal.screen(["ppo"]):
        terminal.print_line("ppo", "starts (ppo.kl.coef 0.05 → 0.2)")
        for step in (1, 2):
            terminal.print_line("ppo", f"[7/9 ppo] step {step}/3  score 0.{step}  9 s left")
            assert terminal._screen.live is not None
            terminal._screen.live.refresh()
        terminal.print_line("ppo", "[7/9 ppo] step 3/3  score 0.3  done in 9 s")
        terminal.end(Outcome("ppo", EXECUTED, 9.0))
    printed = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]|\r", "", capsys.readouterr().out).splitlines()
    lines = [line for text in printed for line in re.split(r"(?=\[1/1 ppo\])", text)]
    permanent = ["starts (ppo.kl.coef 0.05 → 0.2)", "step 3/3  score 0.3  done in 9 s", "ran in 9 s"]
    assert {f"[1/1 ppo] {text}" for text in permanent} <= set(lines)
    assert "[1/1 ppo] step 2/3  score 0.2  9 s left  (0 s)" in lines


def test_table() -> None:
    outcomes = [
        Outcome("a", EXECUTED, 61.27, attempts=2),
        Outcome("long", FAILED, 0),
        Outcome("c", NOT_RUN, 0),
    ]
    assert terminal.outcome_table(outcomes).splitlines() == [
        "stage  outcome          seconds",
        "a      ran (attempt 2)  61.3",
        "long   FAILED",
        "c      not run",
    ]


def test_complaints_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_error("two\n  lines")
    assert capsys.readouterr().err == "error: two lines\n"
    terminal.print_error("params.yaml: a: no;\nb: no; remove it")
    assert capsys.readouterr().err == "error: params.yaml: a: no\n  b: no; remove it\n"


def test_stages_that_are_switched_off_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.screen(["sft", "dpo", "ppo", "rloo"], off={"dpo", "rloo"}):
        for stage in ("sft", "dpo", "ppo"):
            terminal.print_line(stage, "starts")
            terminal.end(Outcome(stage, EXECUTED, 0.0))
        terminal.end(Outcome("rloo", FAILED, 0.0))
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["[1/2 sft] starts", "[1/2 sft] ran", "[2/2 ppo] starts", "[2/2 ppo] ran", "[rloo] FAILED"]
    assert [line.split()[0] for line in terminal.closing_table().splitlines()[:4]] == ["stage", "sft", "ppo", "rloo"]
    assert terminal.closing_table().splitlines()[-2:] == [
        "in all: 2 ran, 1 FAILED",
        "switched off in params.yaml: dpo, rloo",
    ]


def test_metrics_are_flattened_and_null_figures_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "evaluate.json").write_text('{"win_rate": 0.9, "gold_sft": null, "win_rate_judge": "a_b"}')
    (tmp_path / "metrics" / "summary.json").write_text('{"win_rate": 0.9}')
    (tmp_path / "metrics" / "ingest.json").write_text('{"dropped": {"empty": 3}, "source": "demo"}')
    rows = {(row["stage"], row["metric"]): row["value"] for row in metric_rows(tmp_path)}
    assert rows["ingest", "dropped.empty"] == "3"
    assert rows["evaluate", "win_rate_judge"] == "a_b"
    assert rows["evaluate", "gold_sft"] == "null"
    page = report_page(tmp_path)
    assert "| judge of the wins | a\\_b |\n| win rate of the policy against SFT | 0.9 |" in page
    assert "gold" not in page
    assert "\nCommit: none\n" in page
    (tmp_path / "metrics" / "evaluate.json").unlink()  # a clone, whose summary is of another run
    assert "win rate" not in report_page(tmp_path)


def test_the_page_of_a_run_names_its_commit_and_uncommitted_changes(toy: Callable[..., Path]) -> None:
    root = toy({"one": ("work", [])})
    commit(root)
    head = call(root, "git", "rev-parse", "HEAD").strip()
    assert f"\nCommit: `{head}`\n" in report_page(root)
    (root / "input.txt").write_text("an edit")
    assert f"\nCommit: `{head}`, with uncommitted changes\n" in report_page(root)
