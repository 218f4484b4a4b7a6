"""`leash annotate`: people judge answers on a page of this machine, and the labels are exported."""

import getpass
import hashlib
import json
import re
import secrets
import shlex
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.commands.annotate.ask import Ask, most_uncertain
from flows.commands.annotate.export import export
from flows.commands.annotate.statistics import render, statistics
from flows.commands.annotate.store import Store
from flows.commands.annotate.tasks import SAMPLES, Task, first_tasks, read_gold, read_tasks, shuffled
from rlhf_core.errors import UserError
from rlhf_core.locks import FileLock, holder
from tasks.datasets.sources.example import RAW

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,60}")
LONGEST_NAME = 40
"""Characters of an annotator's name."""


@dataclass(frozen=True)
class Call:
    """The options of `leash annotate`."""

    source: Path | None
    """None: the samples of the last run."""
    answers: int
    pairs: int
    ask: Ask
    rewards: tuple[Path, ...]
    overlap: int
    gold: Path | None
    gold_every: int
    guidelines: Path | None
    share: bool
    annotators: tuple[str, ...]
    """Empty: the user of this machine."""
    port: int
    name: str
    seed: int

    def settings(self, root: Path) -> dict[str, Any]:
        """The options that a session keeps, under their names on the command line; paths below `root` are relative, so
        that a project that was moved continues."""
        return {
            "from": _relative(self.source or SAMPLES, root),
            "answers": self.answers,
            "pairs": self.pairs,
            "ask": self.ask,
            "reward": [_relative(folder, root) for folder in self.rewards] if self.ask != "random" else [],
            "overlap": self.overlap,
            "gold": None if self.gold is None else _relative(self.gold, root),
            "gold_every": self.gold_every,
            "seed": self.seed,
        }


def annotate(root: Path, call: Call) -> None:
    """Serve the page until Ctrl-C, then print the figures and the command that exports. Raises UserError for wrong
    options or files, a port in use, and a session that another process has open; nothing is stored then."""
    names = _annotators(call)
    guidelines = None if call.guidelines is None else _read_text(call.guidelines)
    path = database(root, call.name)
    with listening(call) as listener, _alone(path):
        kept = _kept_settings(path)
        tasks = choose_tasks(root, call) if kept is None else []
        if kept is not None:
            _require_same(kept, call.settings(root), path)
        with closing(Store(path)) as store:
            if kept is None:
                store.begin({**call.settings(root), "sha256": _sha256(call.source or root / SAMPLES)}, tasks)
            _print_state(store, kept, root)
            tokens = {name: secrets.token_urlsafe(24) for name in names}
            _serve(store, call, guidelines, listener, tokens)
            print(f"\n{render(statistics(store))}\nexport: leash annotate --export labels.jsonl{_option(call.name)}")


def export_labels(root: Path, name: str, path: Path) -> None:
    """Write the labels of a session and print what to do next. Raises UserError where there is no such session."""
    source = database(root, name)
    if not source.is_file():
        known = ", ".join(sorted(file.stem for file in source.parent.glob("*.db"))) or "none"
        raise UserError(f"{source}: no such session (there are: {known}); start one: leash annotate{_option(name)}")
    with closing(Store(source, read_only=True)) as store:
        if store.settings() is None:
            raise UserError(f"{source}: no labels yet, so nothing to export")
        print(export(store, path))
        print(render(statistics(store)))
    target = root / RAW / path.name
    force = " --force" if target.exists() and target.resolve() != path.resolve() else ""
    print(
        f"next:\n  leash import {shlex.quote(str(path))}{force}\n"
        f"  set in params.yaml: ingest.labels: {json.dumps(path.name)}\n"
        "  and preferences.source: both (the demo: with the simulated annotators' pairs) or dataset (people only)\n"
        "  leash run"
    )


def database(root: Path, name: str) -> Path:
    """The file of a session. Raises UserError for a name that is not usable as a file name."""
    if not NAME.fullmatch(name):
        raise UserError(f"--name {name}: use letters, digits, dots, dashes and underscores, at most 61")
    return root / "work" / "annotate" / f"{name}.db"


def choose_tasks(root: Path, call: Call) -> list[Task]:
    """The tasks of a new session in the order in which they are asked, then its gold questions. Raises UserError."""
    source = call.source or root / SAMPLES
    if not source.is_file():
        hint = "run `leash run preferences` first, or name a file with --from" if call.source is None else "see --from"
        raise UserError(f"{source}: not found; {hint}")
    if call.source is None and source.stat().st_size == 0:
        raise UserError(
            f"{source}: empty, because preferences.source: dataset makes no samples; set judge, model or both and "
            "`leash run preferences`, or name a file with --from"
        )
    candidates = shuffled(read_tasks(source, call.answers), call.seed)
    gold = shuffled(read_gold(call.gold), call.seed) if call.gold is not None else []
    return first_tasks(most_uncertain(candidates, call.ask, call.rewards, root), call.pairs) + gold


@contextmanager
def listening(call: Call) -> Iterator[socket.socket]:
    """A socket that listens at the port: on this machine only, unless shared. Raises UserError where it is in use."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("0.0.0.0" if call.share else "127.0.0.1", call.port))
            listener.listen()
        except OSError as error:
            raise UserError(
                f"port {call.port} cannot be used ({error.strerror}); stop what listens there, or choose another --port"
            ) from None
        yield listener


def _annotators(call: Call) -> tuple[str, ...]:
    names = call.annotators or (_user(),)
    if call.answers not in {2, 4}:
        raise UserError(f"--answers {call.answers}: choose 2 to compare or 4 to rank")
    for name in names:
        if not name.isprintable() or len(name) > LONGEST_NAME:
            raise UserError(f"--annotators: {name!r}: a name has at most {LONGEST_NAME} printable characters")
    if len(set(names)) < len(names):
        raise UserError("--annotators: a name occurs twice; each annotator needs a name of their own")
    if call.share and not call.annotators:
        raise UserError("--share needs the names of the annotators: --annotators anna,ben")
    if call.overlap > len(names):
        raise UserError(
            f"--overlap {call.overlap} needs as many annotators, and there are {len(names)}; name them: --annotators"
        )
    return names


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        raise UserError("this user has no name here; name yourself: --annotators NAME") from None


def _kept_settings(path: Path) -> dict[str, Any] | None:
    """Of a session that was started before. Nothing is written, so that a start that fails leaves no database."""
    if not path.is_file():
        return None
    with closing(Store(path)) as store:
        return store.settings()


def _relative(path: Path, root: Path) -> str:
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def _require_same(kept: Mapping[str, Any], given: Mapping[str, Any], path: Path) -> None:
    for key, value in given.items():
        if kept[key] != value:
            raise UserError(
                f"{path}: this session was started with --{key.replace('_', '-')} {_shown(kept[key])}, not "
                f"{_shown(value)}; give the same options, or another --name"
            )


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _print_state(store: Store, kept: Mapping[str, Any] | None, root: Path) -> None:
    found = statistics(store)
    tasks = store.tasks().values()
    gold = sum(task.right is not None for task in tasks)
    extra = f", gold questions: {gold:,}" if gold else ""
    print(f"{'new session' if kept is None else 'continues'}: {_relative(store.path, root)}")
    print(f"{found.done:,} of {found.wanted:,} labels done; {len(tasks) - gold:,} tasks{extra}")
    if kept is not None and _sha256(root / kept["from"]) not in {kept["sha256"], None}:
        print(f"note: {kept['from']} has changed since; the tasks are still the old ones (--name NEW takes the new)")


def _serve(
    store: Store, call: Call, guidelines: str | None, listener: socket.socket, tokens: Mapping[str, str]
) -> None:
    """Print the addresses and answer requests until Ctrl-C or SIGTERM."""
    import uvicorn

    from flows.commands.annotate.server import build_app, hash_token

    store.add_tokens({name: hash_token(token) for name, token in tokens.items()}, time.time())
    host, port = _own_address() if call.share else "127.0.0.1", listener.getsockname()[1]
    hosts = None if call.share else (f"127.0.0.1:{port}", f"localhost:{port}")
    for name, token in tokens.items():
        print(f"{name}: http://{host}:{port}/?token={token}")
    if call.share:
        print("Anyone with such an address can label under that name; it is sent unencrypted over your network.")
    print("stop with Ctrl-C; the same command continues", flush=True)
    app = build_app(store, guidelines, call.share, hosts)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, proxy_headers=False, ws="none",
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def _own_address() -> str:
    """The address of this machine in its network; the host name where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # of a documentation network; no packet is sent
        return str(probe.getsockname()[0])
    return socket.gethostname()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process serves this session within the block. Raises UserError where one does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock_path = path.with_suffix(".lock")
    lock = FileLock(lock_path)
    if not lock.acquire():
        raise UserError(
            f"{path}: process {holder(lock_path) or '?'} serves this session; stop it, or use another --name"
        )
    try:
        yield
    finally:
        lock.release()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--guidelines {path}: cannot be read ({error}); give a Markdown file in UTF-8") from None


def _sha256(path: Path) -> str | None:
    """Of a file; None where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _option(name: str) -> str:
    return "" if name == "labels" else f" --name {name}"
