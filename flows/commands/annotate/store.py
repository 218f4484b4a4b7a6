"""The database of one annotation session: its tasks, who works on which, and every judgement, each on the disk before
the call returns."""

import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from flows.commands.annotate.tasks import Task, shown_order
from rlhf_core.errors import UserError
from rlhf_core.files import atomic

Action = Literal["rank", "tie", "skip", "flag"]
LEASE_SECONDS = 15 * 60.0
"""How long a task is kept for the annotator who has it on the screen."""
TOKEN_SECONDS = 7 * 86400.0
"""How long an address is valid while the server runs."""
RESTART_SECONDS = 3600.0
"""An address that is older, and whose annotator has judged nothing for so long, ends at the next start."""
LONGEST_SECONDS = 300.0
"""A judgement that took longer contains a pause and does not count for the speed."""

SCHEMA = """
CREATE TABLE settings (value TEXT NOT NULL);
CREATE TABLE tasks (id TEXT PRIMARY KEY, place INTEGER NOT NULL UNIQUE, prompt TEXT NOT NULL, answers TEXT NOT NULL,
  ended TEXT NOT NULL, correct INTEGER);
CREATE TABLE tokens (hash TEXT PRIMARY KEY, annotator TEXT NOT NULL, made REAL NOT NULL);
CREATE TABLE leases (annotator TEXT PRIMARY KEY, task TEXT NOT NULL, since REAL NOT NULL, until REAL NOT NULL);
CREATE TABLE judgements (number INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL, annotator TEXT NOT NULL,
  action TEXT NOT NULL, ranking TEXT NOT NULL, shown TEXT NOT NULL, seconds REAL NOT NULL, time REAL NOT NULL,
  UNIQUE (task, annotator));
CREATE INDEX judgements_of ON judgements (annotator);
"""


class AlreadyJudged(Exception):
    """The annotator has judged this task before, perhaps in another tab."""


class UnknownTask(Exception):
    """There is no such task, or the ranking does not have each answer once."""


@dataclass(frozen=True)
class Judgement:
    """What one annotator chose for one task."""

    task: str
    annotator: str
    action: Action
    ranking: list[int]
    """Places in the task's answers, the best first; empty unless `action` is rank."""
    shown: list[int]
    """Places in the task's answers, in the order in which they were shown."""
    seconds: float
    """From the first look to the choice."""
    time: float
    """Seconds since 1970."""


@dataclass(frozen=True)
class View:
    """What one annotator sees next."""

    task: Task | None
    """None when nothing is left."""
    shown: list[int]
    done: int
    left: int
    """Tasks that remain for this annotator, the one on the screen included."""
    last: str | None
    """The task that undo takes back; None when nothing was judged."""
    seconds: float | None
    per_hour: float | None
    """As of `speed`."""


def speed(seconds: Iterable[float]) -> tuple[float | None, float | None]:
    """The median of the times that judgements took, and judgements an hour; those with a pause are left out."""
    kept = [one for one in seconds if 0 < one <= LONGEST_SECONDS]
    return (median(kept), 3600 / fmean(kept)) if kept else (None, None)


def create(path: Path, settings: Mapping[str, Any], tasks: Sequence[Task]) -> None:
    """Make the database of a session, whole or not at all."""
    with atomic(path) as partial, closing(sqlite3.connect(partial)) as base, base:
        base.executescript(SCHEMA)
        base.execute("INSERT INTO settings VALUES (?)", (json.dumps(settings),))
        for place, task in enumerate(tasks):
            texts = map(json.dumps, (task.prompt, task.answers, task.ended))
            base.execute("INSERT INTO tasks VALUES (?, ?, ?, ?, ?, ?)", (task.id, place, *texts, task.right))


class Store:
    """The open database of a session. All methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        """Open it and read settings and tasks, which never change. Raises UserError where the file is no session."""
        self.path = path
        self._lock = threading.RLock()
        address = f"{path.absolute().as_uri()}?mode=rw"
        try:
            self._base = sqlite3.connect(address, 30.0, uri=True, check_same_thread=False, isolation_level=None)
            self._base.execute("PRAGMA journal_mode = DELETE")  # earlier versions kept a write-ahead log beside it
            self._base.execute("PRAGMA synchronous = EXTRA")  # a commit survives a power cut
            self.settings: dict[str, Any] = json.loads(self._read("SELECT value FROM settings")[0][0])
            rows = self._read("SELECT id, prompt, answers, ended, correct FROM tasks ORDER BY place")
        except sqlite3.Error as error:
            raise UserError(f"{path}: cannot be opened ({error}); move it away, or use another --name") from None
        self.tasks = {
            name: Task(json.loads(prompt), tuple(json.loads(answers)), tuple(json.loads(ended)), right)
            for name, prompt, answers, ended, right in rows
        }

    def close(self) -> None:
        """Close the database."""
        self._base.close()

    def add_tokens(self, hashes: Mapping[str, str], now: float) -> None:
        """Accept new tokens, given as annotator to SHA-256. Those of other annotators end, and those older than
        `RESTART_SECONDS` of annotators who have judged nothing since then."""
        since = now - RESTART_SECONDS
        recent = {name for (name,) in self._read("SELECT annotator FROM judgements WHERE time >= ?", since)}
        with self._transaction() as base:
            for known, name, made in self._read("SELECT hash, annotator, made FROM tokens"):
                if name not in hashes or (made < since and name not in recent):
                    base.execute("DELETE FROM tokens WHERE hash = ?", (known,))
            base.executemany("INSERT INTO tokens VALUES (?, ?, ?)", [(one, name, now) for name, one in hashes.items()])

    def tokens(self, now: float) -> list[tuple[str, str]]:
        """SHA-256 and annotator of every token that is accepted."""
        return self._read("SELECT hash, annotator FROM tokens WHERE made >= ?", now - TOKEN_SECONDS)

    def judgements(self) -> list[Judgement]:
        """All judgements, the oldest first."""
        columns = "task, annotator, action, ranking, shown, seconds, time"
        return [
            Judgement(task, name, action, json.loads(ranking), json.loads(shown), seconds, time)
            for task, name, action, ranking, shown, seconds, time in self._read(
                f"SELECT {columns} FROM judgements ORDER BY number"
            )
        ]

    def view(self, annotator: str, now: float) -> View:
        """The annotator's task, which is kept for them from now on, and their progress."""
        with self._transaction():
            return self._view(annotator, now)

    def judge(self, annotator: str, task: str, action: Action, places: Sequence[int], now: float) -> View:
        """Store a judgement and return the next view. `places`: the shown places (from 0), the best first; only for
        `rank`. Raises AlreadyJudged and UnknownTask, and stores nothing then."""
        if task not in self.tasks:
            raise UnknownTask
        shown = self._shown(task, annotator)
        if sorted(places) != (list(range(len(shown))) if action == "rank" else []):
            raise UnknownTask
        with self._transaction() as base:
            since = self._read("SELECT since FROM leases WHERE annotator = ? AND task = ?", annotator, task)
            seconds = now - since[0][0] if since else 0.0
            ranking = [shown[place] for place in places]
            values = (task, annotator, action, json.dumps(ranking), json.dumps(shown), seconds, now)
            try:
                base.execute("INSERT INTO judgements VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", values)
            except sqlite3.IntegrityError:
                raise AlreadyJudged from None
            return self._view(annotator, now)

    def undo(self, annotator: str, task: str, now: float) -> View:
        """Take back the annotator's last judgement, which must be of `task`, and return the view with it. Raises
        AlreadyJudged, and changes nothing, where another one is the last, as when the same request comes twice, and
        where enough others have the task meanwhile."""
        with self._transaction() as base:
            last = self._read("SELECT task FROM judgements WHERE annotator = ? ORDER BY number DESC LIMIT 1", annotator)
            if last != [(task,)]:
                raise AlreadyJudged
            base.execute("DELETE FROM judgements WHERE task = ? AND annotator = ?", (task, annotator))
            self._keep(annotator, task, now, now)
            view = self._view(annotator, now)
            if view.task is None or view.task.id != task:
                raise AlreadyJudged
            return view

    def _view(self, annotator: str, now: float) -> View:
        """The task that the annotator has on the screen, else a gold question that is due, else the first task that is
        not judged or on the screen of as many others as the overlap."""
        overlap, gold_every = self.settings["overlap"], self.settings["gold_every"]
        judged = dict(self._read("SELECT task, seconds FROM judgements WHERE annotator = ? ORDER BY number", annotator))
        labels = self._read("SELECT task FROM judgements WHERE action IN ('rank', 'tie')")
        leases = self._read("SELECT task FROM leases WHERE annotator != ? AND until > ?", annotator, now)
        taken = Counter(task for (task,) in labels + leases)
        open_ids = [task for task in self.tasks if task not in judged]
        gold = [task for task in open_ids if self.tasks[task].right is not None]
        free = [task for task in open_ids if self.tasks[task].right is None and taken[task] < overlap]

        gold_done = sum(self.tasks[task].right is not None for task in judged)
        labelled = len(judged) - gold_done
        gold_left = min(len(gold), max(0, (labelled + len(free)) // gold_every - gold_done))
        gold_is_due = labelled // gold_every > gold_done
        choices = gold if gold and gold_is_due else free
        last = next(reversed(judged), None)
        if not choices:
            self._base.execute("DELETE FROM leases WHERE annotator = ?", (annotator,))
            return View(None, [], len(judged), 0, last, *speed(judged.values()))
        held = dict(self._read("SELECT task, since FROM leases WHERE annotator = ?", annotator))
        task = next((task for task in choices if task in held), choices[0])
        self._keep(annotator, task, held.get(task, now), now)
        left = len(free) + gold_left
        shown = self._shown(task, annotator)
        return View(self.tasks[task], shown, len(judged), left, last, *speed(judged.values()))

    def _keep(self, annotator: str, task: str, since: float, now: float) -> None:
        lease = (annotator, task, since, now + LEASE_SECONDS)
        self._base.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)", lease)

    def _shown(self, task: str, annotator: str) -> list[int]:
        return shown_order(task, len(self.tasks[task].answers), annotator, self.settings["seed"])

    def _read(self, query: str, *values: object) -> list[Any]:
        with self._lock:
            return self._base.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One write at a time; committed to the disk when the block ends, undone when it raises."""
        with self._lock, self._base:
            self._base.execute("BEGIN IMMEDIATE")
            yield self._base
