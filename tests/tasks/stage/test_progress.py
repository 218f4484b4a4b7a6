"""Progress: a line a few seconds without a terminal, one rewritten line with one, and a true time left."""

from collections.abc import Callable

import pytest

from tasks.stage.progress import Progress, is_progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Progress, Clock]]:
    """A reporter of 10 steps under a clock of the test's."""

    def make(terminal: bool = False) -> tuple[Progress, Clock]:
        clock = Clock()
        monkeypatch.setattr("tasks.stage.progress.time.monotonic", clock)
        monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
        return Progress("[7/9 ppo]", 10, "step", 5.0), clock

    return make


def go(progress: tuple[Progress, Clock], steps: range, seconds: float) -> None:
    reporter, clock = progress
    for step in steps:
        clock.now += seconds
        reporter.update(step, reward=step / 10, gold=None)


def test_a_line_every_few_seconds(
    progress: Callable[..., tuple[Progress, Clock]], capsys: pytest.CaptureFixture[str]
) -> None:
    go(progress(), range(1, 11), 2.0)
    assert capsys.readouterr().out.splitlines() == [
        "[7/9 ppo] step 3/10  reward 0.3",
        "[7/9 ppo] step 6/10  reward 0.6  8 s left",
        "[7/9 ppo] step 9/10  reward 0.9  2 s left",
        "[7/9 ppo] step 10/10  reward 1  done in 20 s",
    ]


def test_a_resumed_loop_estimates_from_its_own_steps(
    progress: Callable[..., tuple[Progress, Clock]], capsys: pytest.CaptureFixture[str]
) -> None:
    go(progress(), range(6, 9), 60.0)
    assert capsys.readouterr().out.splitlines()[-1] == "[7/9 ppo] step 8/10  reward 0.8  2 min 00 s left"


def test_there_is_no_estimate_without_a_basis(
    progress: Callable[..., tuple[Progress, Clock]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first update of a loop over samples is its first batch, after a slow start."""
    reporter, clock = progress()
    reporter.total, reporter.seconds = 12000, 0.0
    for step, seconds in ((64, 30.0), (128, 1.0), (192, 1.0), (256, 1.0)):
        clock.now += seconds
        reporter.update(step)
    assert capsys.readouterr().out.splitlines() == [
        "[7/9 ppo] step 64/12000",
        "[7/9 ppo] step 128/12000",
        "[7/9 ppo] step 192/12000",
        "[7/9 ppo] step 256/12000  3 min 04 s left",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[7/9 ppo] step 3/10  reward 0.3  14 s left", True),
        ("[7/9 evaluate] policy sample 64/12000", True),
        ("[7/9 ppo] step 10/10  reward 1  done in 20 s", False),
        ("[7/9 ppo] ALERT kl 3", False),
        ("[7/9 ppo] 3 of 10 rows are empty", False),
    ],
)
def test_progress_lines_and_others(line: str, expected: bool) -> None:
    assert is_progress(line) is expected


def test_a_terminal_sees_one_line_rewritten(
    progress: Callable[..., tuple[Progress, Clock]], capsys: pytest.CaptureFixture[str]
) -> None:
    go(progress(terminal=True), range(1, 11), 1.0)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert printed.count("\r\033[K") == 10
    assert printed.endswith("done in 10 s\n")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_note_stays(
    terminal: bool, progress: Callable[..., tuple[Progress, Clock]], capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes the place of the line that a terminal sees, and the next line begins below it."""
    reporter, clock = progress(terminal)
    clock.now += 5
    reporter.update(1)
    reporter.note("ALERT")
    clock.now += 5
    reporter.update(2)
    printed = capsys.readouterr().out
    assert "\r\033[K[7/9 ppo] ALERT\n\r" in printed if terminal else "\n[7/9 ppo] ALERT\n[7/9 ppo] step 2" in printed
