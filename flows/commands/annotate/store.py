"""The database of one annotation session: its tasks, who works on which, and every judgement, each on the disk before
the call returns."""

import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flows.commands.annotate.tasks import Task, shown_order
from rlhf_core.errors import UserError

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
FREE = """
SELECT {what} FROM tasks t WHERE t.correct IS NULL
  AND NOT EXISTS (SELECT 1 FROM judgements j WHERE j.task = t.id AND j.annotator = :me)
  AND (SELECT count(*) FROM judgements j WHERE j.task = t.id AND j.action IN ('rank', 'tie'))
    + (SELECT count(*) FROM leases l WHERE l.task = t.id AND l.annotator != :me AND l.until > :now) < :overlap
"""
"""Tasks that an annotator may get: not judged by them, and not judged or on the screen of enough others."""


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


class Store:
    """The open database. All methods may be called from any thread."""

    def __init__(self, path: Path, read_only: bool = False) -> None:
        """Open or make the database. Raises UserError where the file is not one."""
        self.path = path
        self._lock = threading.Lock()
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
        address = path.absolute().as_uri() + ("?mode=ro" if read_only else "")
        try:
            self._base = sqlite3.connect(address, uri=True, check_same_thread=False, isolation_level=None)
            self._base.execute("PRAGMA journal_mode = WAL" if not read_only else "PRAGMA query_only = ON")
            self._base.execute("PRAGMA synchronous = FULL")
            self._base.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if not read_only:
                self._checkpoint()
        except sqlite3.Error as error:
            raise UserError(f"{path}: cannot be opened ({error}); move it away, or use another --name") from None

    def close(self) -> None:
        """Close the database."""
        self._base.close()

    def settings(self) -> dict[str, Any] | None:
        """What the session was started with; None before the first start."""
        if not self._base.execute("SELECT 1 FROM sqlite_master WHERE name = 'settings'").fetchone():
            return None
        return dict(json.loads(self._base.execute("SELECT value FROM settings").fetchone()[0]))

    def begin(self, settings: Mapping[str, Any], tasks: Sequence[Task]) -> None:
        """Store settings and tasks, all or nothing."""
        rows = [
            (task.id, place, *map(json.dumps, (task.prompt, task.answers, task.ended)), task.right)
            for place, task in enumerate(tasks)
        ]
        with self._transaction() as base:
            for statement in SCHEMA.split(";"):
                base.execute(statement)
            base.execute("INSERT INTO settings VALUES (?)", (json.dumps(settings),))
            base.executemany("INSERT INTO tasks VALUES (?, ?, ?, ?, ?, ?)", rows)
        self._checkpoint()

    def add_tokens(self, hashes: Mapping[str, str], now: float) -> None:
        """Accept new tokens, given as annotator to SHA-256. Those of other annotators end, and those older than
        `RESTART_SECONDS` of annotators who have judged nothing since then."""
        names = list(hashes)
        with self._transaction() as base:
            base.execute(f"DELETE FROM tokens WHERE annotator NOT IN ({', '.join('?' * len(names))})", names)
            recent = "SELECT annotator FROM judgements WHERE time >= :since"
            base.execute(
                f"DELETE FROM tokens WHERE made < :since AND annotator NOT IN ({recent})",
                {"since": now - RESTART_SECONDS},
            )
            base.executemany("INSERT INTO tokens VALUES (?, ?, ?)", [(h, name, now) for name, h in hashes.items()])

    def tokens(self, now: float) -> list[tuple[str, str]]:
        """SHA-256 and annotator of every token that is accepted."""
        with self._lock:
            query = "SELECT hash, annotator FROM tokens WHERE made >= ?"
            return list(self._base.execute(query, (now - TOKEN_SECONDS,)))

    def tasks(self) -> dict[str, Task]:
        """All tasks by id, in their order."""
        with self._lock:
            rows = self._base.execute("SELECT * FROM tasks ORDER BY place").fetchall()
        return {row[0]: _task(row) for row in rows}

    def judgements(self) -> list[Judgement]:
        """All judgements, the oldest first."""
        columns = "task, annotator, action, ranking, shown, seconds, time"
        with self._lock:
            rows = self._base.execute(f"SELECT {columns} FROM judgements ORDER BY number").fetchall()
        return [
            Judgement(task, name, action, json.loads(ranking), json.loads(shown), seconds, time)
            for task, name, action, ranking, shown, seconds, time in rows
        ]

    def seconds(self, annotator: str) -> list[float]:
        """How long each of the annotator's judgements took; those with a pause are left out."""
        query = "SELECT seconds FROM judgements WHERE annotator = ? AND seconds > 0 AND seconds <= ?"
        with self._lock:
            return [row[0] for row in self._base.execute(query, (annotator, LONGEST_SECONDS))]

    def view(self, annotator: str, now: float) -> View:
        """The annotator's task, which is kept for them from now on, and their progress."""
        with self._transaction() as base:
            return self._view(base, annotator, now)

    def judge(self, annotator: str, task: str, action: Action, places: Sequence[int], now: float) -> View:
        """Store a judgement and return the next view. `places`: the shown places (from 0), the best first; only for
        `rank`. Raises AlreadyJudged and UnknownTask, and stores nothing then."""
        with self._transaction() as base:
            row = base.execute("SELECT * FROM tasks WHERE id = ?", (task,)).fetchone()
            if row is None:
                raise UnknownTask
            answers = len(_task(row).answers)
            if sorted(places) != (list(range(answers)) if action == "rank" else []):
                raise UnknownTask
            shown = self._shown(task, answers, annotator)
            lease = base.execute("SELECT since FROM leases WHERE annotator = ? AND task = ?", (annotator, task))
            seconds = now - (lease.fetchone() or (now,))[0]
            ranking = [shown[place] for place in places]
            values = (task, annotator, action, json.dumps(ranking), json.dumps(shown), seconds, now)
            try:
                base.execute(
                    "INSERT INTO judgements (task, annotator, action, ranking, shown, seconds, time) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    values,
                )
            except sqlite3.IntegrityError:
                raise AlreadyJudged from None
            return self._view(base, annotator, now)

    def undo(self, annotator: str, task: str, now: float) -> View:
        """Take back the annotator's last judgement, which must be of `task`, and return the view with it. Raises
        AlreadyJudged, and changes nothing, where another one is the last, as when the same request comes twice, and
        where enough others have the task meanwhile."""
        with self._transaction() as base:
            last = self._last(base, annotator)
            if last is None or last != task:
                raise AlreadyJudged
            base.execute("DELETE FROM judgements WHERE task = ? AND annotator = ?", (task, annotator))
            lease = (annotator, task, now, now + LEASE_SECONDS)
            base.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)", lease)
            view = self._view(base, annotator, now)
            if view.task is None or view.task.id != task:
                raise AlreadyJudged
            return view

    def _view(self, base: sqlite3.Connection, annotator: str, now: float) -> View:
        settings = self._settings(base)
        bound = {"me": annotator, "now": now, "overlap": settings["overlap"]}
        done, gold = base.execute(
            "SELECT count(*), count(t.correct) FROM judgements j JOIN tasks t ON t.id = j.task WHERE j.annotator = :me",
            bound,
        ).fetchone()
        (free,) = base.execute(FREE.format(what="count(*)"), bound).fetchone()
        (golds,) = base.execute("SELECT count(*) FROM tasks WHERE correct IS NOT NULL").fetchone()
        due = min(golds, (done - gold) // settings["gold_every"]) - gold
        later = min(golds, (done - gold + free) // settings["gold_every"]) - gold
        row = self._next(base, bound, due > 0)
        task = None if row is None else _task(row)
        last = self._last(base, annotator)
        if task is None:
            base.execute("DELETE FROM leases WHERE annotator = :me", bound)
            return View(None, [], done, 0, last)
        keep = "INSERT INTO leases VALUES (?, ?, ?, ?) ON CONFLICT (annotator) DO UPDATE SET until = excluded.until, "
        keep += "since = CASE WHEN task = excluded.task THEN since ELSE excluded.since END, task = excluded.task"
        base.execute(keep, (annotator, task.id, now, now + LEASE_SECONDS))
        return View(task, self._shown(task.id, len(task.answers), annotator), done, free + max(later, 0), last)

    def _next(self, base: sqlite3.Connection, bound: Mapping[str, Any], gold_due: bool) -> tuple[Any, ...] | None:
        """The row of the annotator's own task, else of a gold question that is due, else of the first free task."""
        own = "SELECT t.* FROM tasks t JOIN leases l ON l.task = t.id AND l.annotator = :me WHERE t.correct IS NOT NULL"
        new = "SELECT t.* FROM tasks t WHERE t.correct IS NOT NULL"
        unjudged = " AND NOT EXISTS (SELECT 1 FROM judgements j WHERE j.task = t.id AND j.annotator = :me)"
        queries = [own + unjudged, f"{new}{unjudged} ORDER BY t.place LIMIT 1"] if gold_due else [own + unjudged]
        held = "t.id = (SELECT task FROM leases WHERE annotator = :me) DESC"
        queries.append(f"{FREE.format(what='t.*')} ORDER BY {held}, t.place LIMIT 1")
        rows = (base.execute(query, bound).fetchone() for query in queries)
        return next((tuple(row) for row in rows if row is not None), None)

    def _last(self, base: sqlite3.Connection, annotator: str) -> str | None:
        query = "SELECT task FROM judgements WHERE annotator = ? ORDER BY number DESC LIMIT 1"
        row = base.execute(query, (annotator,)).fetchone()
        return None if row is None else str(row[0])

    def _shown(self, task: str, answers: int, annotator: str) -> list[int]:
        return shown_order(task, answers, annotator, self._settings(self._base)["seed"])

    def _settings(self, base: sqlite3.Connection) -> dict[str, Any]:
        return dict(json.loads(base.execute("SELECT value FROM settings").fetchone()[0]))

    def _checkpoint(self) -> None:
        """Move everything from the write-ahead log into the database file."""
        self._base.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One write at a time; committed to the disk when the block ends, undone when it raises."""
        with self._lock:
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield self._base
                self._base.execute("COMMIT")
            except BaseException:
                if self._base.in_transaction:
                    self._base.execute("ROLLBACK")
                raise


def _task(row: Sequence[Any]) -> Task:
    _, _, prompt, answers, ended, right = row
    return Task(json.loads(prompt), tuple(json.loads(answers)), tuple(json.loads(ended)), right)
