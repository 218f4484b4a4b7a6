"""Builds the tree of hashes from a model, dataset or metrics file back to the raw data."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rlhf_core.errors import UserError
from tasks.records.recorded import Record, made_by, parse, recorded
from tasks.stage import provenance, rounds
from tasks.stage.definition import RAW, ROUND, digest, git
from tasks.stage.dvc_files import LOCK_FILE, Project, open_project

State = Literal["as recorded", "changed since", "missing", "unknown here"]
GATES = ("data/check.ok", "data/check_data.ok")
"""Constants that stages depend on; not shown as inputs."""
WORLD = "rlhf_core/demo"


@dataclass(frozen=True)
class Node:
    """An artefact with its recorded hash, the state of the workspace's copy, and its inputs."""

    path: str
    digest: str
    state: State
    record: Record | None = None
    code_changed: tuple[str, ...] = ()
    """Code of the stage that has changed since."""
    inputs: tuple["Node", ...] = ()
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


@dataclass
class Lineage:
    """Builds trees in one project."""

    project: Project
    known: dict[tuple[str, str], Node] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """The folder of the project."""
        return self.project.root

    @cached_property
    def records(self) -> dict[str, Record]:
        """The entries of dvc.lock, if the file exists."""
        return recorded(self.root) if (self.root / LOCK_FILE).is_file() else {}

    @cached_property
    def outs(self) -> list[str]:
        """Every output that dvc.yaml declares or dvc.lock names."""
        declared = [out.path for stage in self.project.stages for out in stage.outs]
        return list(dict.fromkeys([*declared, *(out for record in self.records.values() for out in record.outs)]))

    @cached_property
    def closed(self) -> dict[int, str]:
        """DVC's hash of each closed round."""
        found = {file.path: file.recorded or "" for file in self.project.tracked if ROUND.fullmatch(file.path)}
        return {int(path.rpartition("/")[2]): value for path, value in found.items()}

    @cached_property
    def past(self) -> dict[int, dict[str, Record]]:
        """The entries of dvc.lock in the commit of each closed round; none where git does not have the commit."""
        commits = {number: rounds.read_note(self.root, number)["commit"] for number in self.closed}
        texts = {number: git(self.root, "show", f"{commit}:./{LOCK_FILE}") for number, commit in commits.items()}
        return {number: parse(text, f"{LOCK_FILE} of {commits[number][:8]}") for number, text in texts.items() if text}

    def closed_in(self, digest: str) -> int | None:
        """How many rounds were closed when the folder rounds had this hash; None where nobody knows."""
        for number, records in self.past.items():
            if any(record.inputs.get(rounds.ROUNDS) == digest for record in records.values()):
                return number - 1
        now = self.project.hash_at(self.root / rounds.ROUNDS)
        return len(self.closed) if digest == now or not self.closed else None

    def of(self, path: Path) -> Node:
        """The tree of the artefact at the absolute `path`. Raises UserError if no stage makes it or no hash is
        recorded."""
        place = path.resolve()
        inside = place.relative_to(self.root.resolve()).as_posix() if place.is_relative_to(self.root.resolve()) else ""
        if (match := ROUND.match(inside)) and (number := int(match[0].rpartition("/")[2])) in self.closed:
            return self._round(number)
        out = next((out for out in self.outs if inside == out or inside.startswith(f"{out}/")), None)
        if out is None:
            return self._copied(place)
        now = next((record.outs[out] for record in self.records.values() if out in record.outs), None)
        if now is not None:
            return self.node(out, now)
        own, found = provenance.read(self.root / out), self.project.hash_at(self.root / out)
        if found is None or own is None:
            raise UserError(f"{out}: dvc.lock does not name it; `dvc repro` makes it")
        return self._made(out, found, "unknown here", _from_provenance(own), ["dvc.lock does not name it"])

    def _copied(self, place: Path) -> Node:
        own = provenance.read(place) if place.is_dir() else None
        found = self.project.hash_at(place) if place.exists() else None
        names = [path for record in self.records.values() for path, value in record.outs.items() if value == found]
        record = self._maker(names[0], found) if names and found else _from_provenance(own) if own else None
        if record is None or found is None:
            what = "neither made by a stage nor a copy of a model" if place.exists() else "file not found"
            name, folders = place.name, sorted({out.partition("/")[0] for out in self.outs})
            near = [out for out in self.outs if name in out] or get_close_matches(name, self.outs, cutoff=0.5)
            hint = f"did you mean {', '.join(near)}?" if near else f"results are in {', '.join(folders)}"
            raise UserError(f"{place}: {what}; {hint}")
        if not names:
            note = "dvc.lock does not name this content: changed since it was made, or made elsewhere"
            return self._made(str(place), found, "unknown here", record, [note])
        return self._made(str(place), found, "as recorded", record, [f"is {names[0]} of {LOCK_FILE}"])

    def node(self, path: str, digest: str) -> Node:
        """The artefact that had this hash at `path`, with everything below it."""
        if (path, digest) not in self.known:
            self.known[path, digest] = self._find(path, digest)
        return self.known[path, digest]

    def _find(self, path: str, digest: str) -> Node:
        state = self.state(path, digest)
        if path == rounds.ROUNDS and (last := self.closed_in(digest)):
            return Node(path, digest, state, inputs=(self._round(last),))
        if path not in self.outs:
            known = path == RAW and state == "as recorded"
            return Node(path, digest, state, inputs=tuple(self._tracked_data()) if known else ())
        record = self._own_record(path, state) or self._maker(path, digest)
        if record is None:
            note = "unknown: neither dvc.lock nor DVC's cache says how this was made; check out the commit that has it"
            return Node(path, digest, state, notes=(note,))
        return self._made(path, digest, state, record, [])

    def _maker(self, path: str, digest: str) -> Record | None:
        """The execution whose output at `path` has this hash, of dvc.lock now or in the commit of a closed round."""
        found = (made_by(records, path, digest) for records in (self.records, *self.past.values()))
        return next((record for record in found if record is not None), None)

    def _round(self, number: int) -> Node:
        """A closed round, with what its policy and pairs were made from."""
        note, path = rounds.read_note(self.root, number), f"{rounds.ROUNDS}/{number}"
        inputs = []
        for name, out in ((rounds.POLICY, rounds.MODEL), (rounds.PAIRS, rounds.PREFERENCES)):
            place, value = rounds.path_in(number, name), note[name.partition(".")[0]]
            own = provenance.read(self.root / place)
            record = _from_provenance(own) if own else self._maker(out, value)
            state = self.state(place, value)
            inputs.append(self._made(place, value, state, record, []) if record else Node(place, value, state))
        about = f"round {number}, closed at commit {note['commit'][:8]}; tracked by {path}.dvc"
        return Node(path, self.closed[number], self.state(path, self.closed[number]), inputs=(*inputs,), notes=(about,))

    def state(self, path: str, digest: str) -> State:
        """How the workspace's content at `path` compares with this hash."""
        found = self.project.hash_at(self.root / path)
        return "missing" if found is None else "as recorded" if found == digest else "changed since"

    def _own_record(self, path: str, state: State) -> Record | None:
        """The record beside the model of the workspace, if that is the one; it has the reasons of exemptions."""
        own = provenance.read(self.root / path) if state == "as recorded" else None
        return _from_provenance(own) if own else None

    def _made(self, path: str, digest: str, state: State, record: Record, notes: list[str]) -> Node:
        shown = {
            name: value
            for name, value in sorted(record.inputs.items())
            if name not in GATES and not (name == rounds.ROUNDS and self.closed_in(value) == 0)
        }
        inputs = [self.node(name, value) for name, value in shown.items()]
        changed = [name for name, value in sorted(record.code.items()) if self.state(name, value) != "as recorded"]
        exempt = [f"exempt from byte identity: {text}" for text in record.exemptions]
        everything = (*self._origins(record), *inputs)
        return Node(path, digest, state, record, tuple(changed), everything, (*notes, *exempt))

    def _tracked_data(self) -> Iterator[Node]:
        """The files below data/raw/ that DVC tracks."""
        for file in self.project.tracked:
            if file.path.startswith(f"{RAW}/") and file.recorded:
                note = f"tracked by {file.path}.dvc"
                yield Node(file.path, file.recorded, self.state(file.path, file.recorded), notes=(note,))

    def _origins(self, record: Record) -> Iterator[Node]:
        """A stage's inputs from outside the repository: the demo world, datasets and models of the hub."""
        block = record.params.get(record.stage)
        if not isinstance(block, Mapping):
            return
        if record.stage == "ingest" and block.get("source") == "demo":
            world = {name: value for name, value in record.code.items() if name.startswith(WORLD)}
            same = all(self.state(name, value) == "as recorded" for name, value in world.items())
            note = f"{WORLD}, seed {block.get('seed')}; the hash is of the code"
            yield Node(
                "the built-in demo world", digest(world), "as recorded" if same else "changed since", notes=(note,)
            )
        for name, key in (("huggingface", "dataset"), ("pretrained", "model")):
            source = block.get(name) if block.get("source") == name else None
            if isinstance(source, Mapping) and source.get("revision"):
                note = "from the Hugging Face hub, at this revision"
                yield Node(str(source.get(key)), str(source["revision"]), "unknown here", notes=(note,))


def _from_provenance(own: Mapping[str, Any]) -> Record:
    return Record(
        stage=own["stage"],
        command=own["command"],
        params=own["params"],
        inputs=own["inputs"],
        code=own["code"],
        outs={},
        source="provenance.json",
        versions=own["versions"],
        exemptions=tuple(own["exemptions"]),
    )


def lineage(root: Path, path: Path) -> Node:
    """The tree of the artefact at `path`. Raises UserError (see `Lineage.of`)."""
    with open_project(root) as project:
        return Lineage(project).of(path)
