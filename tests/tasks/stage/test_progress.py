"""Progress: a line a few seconds without a terminal, one rewritten line with one, and a true time left."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from tasks.stage.progress import Progress, Watch, is_progress

if TYPE_CHECKING:
    from tasks.stage.stage import Stage


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


def test_reading_beside_the_rounds_has_a_speed_of_its_own(
    progress: Callable[..., tuple[Progress, Clock]], capsys: pytest.CaptureFixture[str]
) -> None:
    """100 answers, each drawn in a second and read twice in two: after 20 answers 80·(1 + 4) s are left, and during
    the reading it falls."""
    reporter, clock = progress()
    reporter.total, reporter.reads, reporter.seconds = 100, 200, 0.0
    for step in (10, 20):
        reporter.within("sampling", 0, 10)
        clock.now += 10
        reporter.update(step)
        for _ in range(2):
            for row in range(0, 10, 5):
                reporter.within("reading", row, 10)
                clock.now += 10
    reporter.within("sampling", 0, 10)
    assert reporter.seconds_left(20) == pytest.approx(80 + 160 * 2)
    assert "reading 5/10  6 min 50 s left" in capsys.readouterr().out


@pytest.mark.parametrize("skipped", [0, 20])
def test_the_next_part_of_a_loop_keeps_its_speed(skipped: int, progress: Callable[..., tuple[Progress, Clock]]) -> None:
    """Also where an earlier process has done a part of it."""
    reporter, clock = progress()
    reporter.total = 100
    go((reporter, clock), range(10, 50, 10), 10.0)
    reporter.skip(skipped)
    assert reporter.seconds_left(reporter.done) == 60 - skipped


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


class Watched:
    """A stage's `Watch` under a clock, and what it warned of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.warned = Clock(), list[str]()
        self.clock.now = 100.0
        monkeypatch.setattr("tasks.stage.progress.time.monotonic", self.clock)
        monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
        self.watch = Watch("[7/9 ppo]", 5.0, self.warned.append)

    def go(self, seconds: float, work: str, done: float, total: int, tokens: int = 0) -> None:
        self.clock.now += seconds
        self.watch(work, done, total, tokens)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_work_outside_a_loop_is_shown_from_the_first_second(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    watched.go(0, "loading models/sft", 0, 1)
    for row in range(1, 13):
        watched.go(1, "encoding", row, 12)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "[7/9 ppo] loading models/sft",
        "[7/9 ppo] encoding 1/12",
        "[7/9 ppo] encoding 6/12  6 s left",
        "[7/9 ppo] encoding 11/12  1 s left",
    ]
    assert all(map(is_progress, lines))


def test_a_step_of_minutes_shows_its_phase(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    """With the time left that the loop has estimated."""
    loop = watched.watch.begin(10, "step")
    watched.go(6, "sampling", 16.5, 64)
    watched.clock.now += 54
    loop.update(1, left=540.0, kl=0.5)
    watched.go(60, "updating", 3, 8)
    assert capsys.readouterr().out.splitlines() == [
        "[7/9 ppo] step 0/10  sampling 16/64",
        "[7/9 ppo] step 1/10  kl 0.5  9 min 00 s left",
        "[7/9 ppo] step 1/10  kl 0.5  updating 3/8  8 min 00 s left",
    ]


def test_parts_of_a_step_move_its_time_left(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    """A training of 4 steps of 40 seconds: after a quarter of the first, 150 of 160 seconds are left."""
    watched.watch.begin(4, "step")
    for part in (0.0, 0.25, 0.5):
        watched.go(10, "step", part, 4)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "[7/9 ppo] step 0/4  2 min 30 s left",
        "[7/9 ppo] step 0/4  2 min 20 s left",
    ]


def test_answers_of_all_models_are_one_count(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    """The second model's are known from an earlier process, which took no time."""
    loop = watched.watch.begin(300, "answer")
    loop.unit = "sft answer"
    for row in (0, 50):
        watched.go(50, "sampling", row, 100)
    loop.update(100)
    loop.skip(100)
    loop.unit = "dpo answer"
    for row in (0, 50):
        watched.go(50, "sampling", row, 100)
    assert capsys.readouterr().out.splitlines() == [
        "[7/9 ppo] sft answer 0/300",
        "[7/9 ppo] sft answer 50/300  4 min 10 s left",
        "[7/9 ppo] dpo answer 200/300  1 min 40 s left",
        "[7/9 ppo] dpo answer 250/300  50 s left",
    ]


@pytest.mark.parametrize(("tokens", "warnings"), [(2000, 0), (90, 1)])
def test_a_slow_sampler_is_warned_of_once(watched: Watched, tokens: int, warnings: int) -> None:
    """By the seconds of sampling alone: the hour before it is other work."""
    watched.watch.begin(64, "reference answer")
    watched.go(3600, "scoring", 1, 2)
    for row in range(30):
        watched.go(1, "sampling", row, 64, tokens)
    assert len(watched.warned) == warnings
    assert all("draws 90 tokens a second; the rest of this loop takes about" in text for text in watched.warned)


def test_samplers_of_one_count_continue_after_a_kill(
    make_stage: "Callable[..., Stage[Any]]", capsys: pytest.CaptureFixture[str]
) -> None:
    """The second process finds the first model's answers and a part of the second one's."""

    def run(names: Sequence[str], end: int) -> None:
        stage = make_stage("evaluate", None, [])
        progress = stage.progress(8, "answer")
        for name in names:
            batches = [[1, 2], [3, 4]][: end if name == names[-1] else 2]
            found = stage.resumed(f"answers-{name}", batches, list, unit=f"{name} answer", progress=progress)
            assert found == [value for batch in batches for value in batch]

    run(["sft", "policy"], 1)
    capsys.readouterr()
    run(["sft", "policy"], 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "[evaluate] answers-sft: continues after sft answer 4",
        "[evaluate] answers-policy: continues after policy answer 2",
        "[evaluate] policy answer 8/8  done in 0 s",
    ]
