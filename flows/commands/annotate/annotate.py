"""`leash annotate`: people judge answers on a page of this machine, and the labels are exported."""

import getpass
import hashlib
import json
import math
import os
import re
import secrets
import shlex
import socket
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.commands.annotate.labels import export, render, statistics
from flows.commands.annotate.store import Store, create
from flows.commands.annotate.tasks import (
    SAMPLES,
    Ask,
    Task,
    first_tasks,
    most_uncertain,
    read_gold,
    read_tasks,
    reward_models,
    shuffled,
)
from rlhf_core.errors import UserError
from rlhf_core.locks import held
from tasks.datasets.sources.example import RAW

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,60}")
TO_CHOOSE_FROM = 4
"""Times the answers that are needed, where reward models choose among a model's answers."""
LONGEST_NAME = 40
"""Characters of an annotator's name."""


@dataclass(frozen=True)
class Call:
    """The options of `leash annotate`."""

    source: Path | None
    """None: the samples of the last run."""
    model: Path | None
    """Its answers are sampled in place of `source`."""
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

    def answers_of(self, root: Path) -> Path:
        """The file of prompts with answers."""
        if self.model is not None:
            return database(root, self.name).with_suffix(".answers.jsonl")
        return self.source or root / SAMPLES

    def settings(self, root: Path) -> dict[str, Any]:
        """The options that a session keeps, under their names on the command line; paths below `root` are relative, so
        that a project that was moved continues."""
        return {
            "model": None if self.model is None else _relative(self.model, root),
            "from": _relative(self.answers_of(root), root),
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
    options or files, a port in use, and a session that another process has open; no session begins then."""
    names = _annotators(call)
    try:
        guidelines = None if call.guidelines is None else call.guidelines.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        where = f"--guidelines {call.guidelines}"
        raise UserError(f"{where}: cannot be read ({error}); give a Markdown file in UTF-8") from None
    path = database(root, call.name)
    settings, source = call.settings(root), call.answers_of(root)
    with listening(call) as listener, held(path.with_suffix(".lock"), 0.0, f"serves this session ({path})"):
        is_new = not path.is_file()
        if is_new:
            weights = _weights(call.model)  # those that answer, if a run replaces them meanwhile
            tasks = choose_tasks(root, call)  # first: it refuses a source that is missing
            create(path, {**settings, "sha256": _sha256(source), "weights": weights}, tasks)
        with closing(Store(path)) as store:
            for key, value in settings.items():
                if (before := store.settings.get(key)) != value:
                    raise UserError(
                        f"{path}: this session was started with --{key.replace('_', '-')} {_shown(before)}, not "
                        f"{_shown(value)}; give the same options, or another --name"
                    )
            found = statistics(store)
            gold = sum(task.right is not None for task in store.tasks.values())
            print(f"{'new session' if is_new else 'continues'}: {_relative(path, root)}")
            print(
                f"{found['done']:,} of {found['wanted']:,} labels done; {len(store.tasks) - gold:,} tasks"
                f"{f', gold questions: {gold:,}' if gold else ''}"
            )
            if source.is_file() and _sha256(source) != store.settings["sha256"]:
                changed = f"note: {settings['from']} has changed since"
                print(f"{changed}; the tasks are still the old ones (--name NEW takes the new)")
            if call.model is not None and _weights(call.model) != store.settings["weights"]:
                changed = f"note: {settings['model']} has changed since"
                print(f"{changed}; the answers are still the old ones (--name NEW --seed {call.seed + 1} samples new)")
            _serve(store, call, names, guidelines, listener)
            print(f"\n{render(statistics(store))}\nexport: leash annotate --export labels.jsonl{_option(call.name)}")


def export_labels(root: Path, name: str, path: Path) -> None:
    """Write the labels of a session and print what to do next. Raises UserError where there is no such session."""
    source = database(root, name)
    if not source.is_file():
        known = ", ".join(sorted(file.stem for file in source.parent.glob("*.db"))) or "none"
        raise UserError(f"{source}: no such session (there are: {known}); start one: leash annotate{_option(name)}")
    with closing(Store(source)) as store:
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
    source = call.answers_of(root)
    gold = shuffled(read_gold(call.gold), call.seed) if call.gold is not None else []
    models = reward_models(call.ask, call.rewards)
    if call.model is not None:
        from flows.commands.annotate.sampling import sample_answers  # with torch, which a file does not need

        prompts = math.ceil(call.pairs / math.comb(call.answers, 2))
        spare = 1 if call.ask == "random" else TO_CHOOSE_FROM
        sample_answers(root, call.model, prompts * spare, call.answers, call.seed, source)
    if not source.is_file():
        hint = "run `leash run preferences` first, or name a file with --from" if call.source is None else "see --from"
        raise UserError(f"{source}: not found; {hint}")
    if call.source is None and call.model is None and source.stat().st_size == 0:
        raise UserError(
            f"{source}: empty, because preferences.source: dataset makes no samples; compare answers of the policy: "
            "--model models/policy, or name a file with --from"
        )
    candidates = shuffled(read_tasks(source, call.answers), call.seed)
    tasks = first_tasks(most_uncertain(candidates, call.ask, models, root), call.pairs)
    if (found := sum(len(task.pairs) for task in tasks)) < call.pairs and call.model is not None:
        print(f"note: {found:,} pairs in place of {call.pairs:,}: too few prompts fit, or answers are equal or empty")
    return tasks + gold


def listening(call: Call) -> socket.socket:
    """A socket that listens at the port: on this machine only, unless shared. Raises UserError where it is in use."""
    try:
        return socket.create_server(("0.0.0.0" if call.share else "127.0.0.1", call.port))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UserError(
            f"port {call.port} cannot be used ({reason}); stop what listens there, or choose another --port"
        ) from None


def _annotators(call: Call) -> tuple[str, ...]:
    try:
        names = call.annotators or (getpass.getuser(),)
    except (KeyError, OSError):
        raise UserError("this user has no name here; name yourself: --annotators NAME") from None
    if call.source is not None and call.model is not None:
        raise UserError("--from and --model: a file or a model gives the answers; leave one of them out")
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


def _serve(store: Store, call: Call, names: tuple[str, ...], guidelines: str | None, listener: socket.socket) -> None:
    """Print an address for each annotator and answer requests until Ctrl-C or SIGTERM."""
    import uvicorn

    from flows.commands.annotate.server import build_app, hash_token

    tokens = {name: secrets.token_urlsafe(24) for name in names}
    store.add_tokens({name: hash_token(token) for name, token in tokens.items()}, time.time())
    host, port = "127.0.0.1", listener.getsockname()[1]
    if call.share:
        host = socket.gethostname()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect(("192.0.2.1", 9))  # of a documentation network; no packet is sent
            host = str(probe.getsockname()[0])  # this machine's address in its network
    for name, token in tokens.items():
        print(f"{name}: http://{host}:{port}/?token={token}")
    if call.share:
        print("Anyone with such an address can label under that name; it is sent unencrypted over your network.")
    print("stop with Ctrl-C; the same command continues", flush=True)
    app = build_app(store, guidelines, call.share, None if call.share else {f"127.0.0.1:{port}", f"localhost:{port}"})
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, proxy_headers=False, ws="none",
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weights(folder: Path | None) -> str | None:
    """A hash of a model's weights; None without a model."""
    if folder is None:
        return None
    return " ".join(_sha256(path)[:16] for path in sorted(folder.glob("*.safetensors")))


def _relative(path: Path, root: Path) -> str:
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _option(name: str) -> str:
    return "" if name == "labels" else f" --name {name}"
