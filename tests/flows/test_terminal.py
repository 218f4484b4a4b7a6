"""Live lines and the closing table."""

from pathlib import Path

import pytest

from flows import terminal
from flows.artifacts import metric_rows, report_page
from flows.stages import EXECUTED, FAILED, NOT_RUN, Outcome


def test_say_is_silent_until_opened_and_leaves_out_dvcs_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal._screen, "open", False)
    terminal.say("sft", "step 1/3")
    assert capsys.readouterr().out == ""
    terminal.open_screen()
    terminal.say("sft", "step 2/3")
    terminal.say("sft", "Use `dvc push` to send your updates to remote storage.")
    terminal.say("sft", "")
    assert capsys.readouterr().out == "sft           | step 2/3\n"


def test_table() -> None:
    text = terminal.outcome_table([Outcome("a", EXECUTED, 61.27), Outcome("long", FAILED, 0), Outcome("c", NOT_RUN, 0)])
    assert text.splitlines() == ["stage  outcome  seconds", "a      ran      61.3", "long   FAILED", "c      not run"]


def test_complaints_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.complain("two\n  lines")
    assert capsys.readouterr().err == "error: two lines\n"


def test_metrics_are_flattened_and_null_figures_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "evaluate.json").write_text(
        '{"win_rate": 0.9, "gold_sft": null, "win_rate_ci95": [0.85, 0.95]}'
    )
    (tmp_path / "metrics" / "ingest.json").write_text('{"dropped": {"empty": 3}, "source": "demo"}')
    rows = {(row["stage"], row["metric"]): row["value"] for row in metric_rows(tmp_path)}
    assert rows["ingest", "dropped.empty"] == "3"
    assert rows["evaluate", "win_rate_ci95"] == "0.85 – 0.95"
    assert rows["evaluate", "gold_sft"] == "null"
    page = report_page(tmp_path)
    assert "| win rate of the policy against SFT | 0.9 |" in page
    assert "gold" not in page
