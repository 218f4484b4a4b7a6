"""`leash lineage`: a tree from a model, dataset or metrics file back to the raw data. Each artifact has its hash, the
stage and parameters that made it, and whether the workspace still has it."""

import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from flows.text import dotted, shorten
from rlhf_core.errors import UserError
from tasks.records.recorded import Record, made_by, parse
from tasks.stage import provenance, rounds
from tasks.stage.definition import RAW, ROUND, git
from tasks.stage.dvc_files import LOCK_FILE, Project, digest, open_project, read_lock_file

State = Literal["as recorded", "changed since", "missing", "unknown here"]
GATES = ("data/check.ok", "data/check_data.ok")
"""Constants that stages depend on; not shown as inputs."""
WORLD = "rlhf_core/demo"
DIGITS = 8
NARROWEST = 60


@dataclass(frozen=True)
class Node:
    """An artifact with its recorded hash, the state of the workspace's copy, and its inputs."""

    path: str
    digest: str
    state: State
    record: Record | None = None
    code_changed: tuple[str, ...] = ()
    """Code of the stage that has changed since."""
    inputs: tuple["Node", ...] = ()
    notes: tuple[str, ...] = ()


def show(root: Path, path: Path) -> tuple[dict[str, Any], str]:
    """(for `--json`, for a terminal). Raises UserError as `lineage`."""
    tree = lineage(root, path)
    width = max(NARROWEST, shutil.get_terminal_size((120, 24)).columns)
    return asdict(tree), "\n".join(_lines(tree, "", "", width, set()))


def lineage(root: Path, path: Path) -> Node:
    """The tree of the artifact at the absolute `path`. Raises UserError if no stage makes it or no hash is recorded."""
    with open_project(root) as project:
        return Lineage(project).of(path)


class Lineage:
    """Builds trees in one project."""

    def __init__(self, project: Project) -> None:
        self.project, self.root = project, project.root
        self.records = parse(read_lock_file(self.root) or "", LOCK_FILE)
        declared = [out.path for stage in project.stages for out in stage.outs]
        named = [out for record in self.records.values() for out in record.outs]
        self.outs = list(dict.fromkeys([*declared, *named]))
        closed = [file for file in project.tracked if ROUND.fullmatch(file.path)]
        self.closed = {int(Path(file.path).name): file.recorded or "" for file in closed}
        """DVC's hash of each closed round."""
        self.past: dict[int, dict[str, Record]] = {}
        """The entries of dvc.lock in the commit of each closed round; none where git does not have the commit."""
        for number in self.closed:
            commit = rounds.read_note(self.root, number)["commit"]
            if text := git(self.root, "show", f"{commit}:./{LOCK_FILE}"):
                self.past[number] = parse(text, f"{LOCK_FILE} of {commit[:DIGITS]}")
        self._known: dict[tuple[str, str], Node] = {}

    def of(self, path: Path) -> Node:
        """As `lineage`."""
        place, root = path.resolve(), self.root.resolve()
        inside = place.relative_to(root).as_posix() if place.is_relative_to(root) else ""
        if (match := ROUND.match(inside)) and (number := int(match[0].rpartition("/")[2])) in self.closed:
            return self._round(number)
        out = next((out for out in self.outs if inside == out or inside.startswith(f"{out}/")), "")
        recorded = next((record.outs[out] for record in self.records.values() if out in record.outs), None)
        if recorded is not None:
            return self.node(out, recorded)
        # A copy of an output, which its bytes or the provenance beside it identify
        present, own = self.project.hash_at(place), _provenance(root / out if out else place)
        names = [path for record in self.records.values() for path, value in record.outs.items() if value == present]
        if present and names:
            record = self._maker(names[0], present)
            return self._made(str(place), present, "as recorded", record, f"is {names[0]} of {LOCK_FILE}")
        if present and own:
            note = "dvc.lock does not name this content: changed since it was made, or made elsewhere"
            return self._made(str(place), present, "unknown here", own, note)
        if out:
            raise UserError(f"{out}: dvc.lock does not name it; `dvc repro` makes it")
        what = "neither made by a stage nor a copy of a model" if place.exists() else "file not found"
        near = [out for out in self.outs if place.name in out] or get_close_matches(place.name, self.outs, cutoff=0.5)
        folders = sorted({out.partition("/")[0] for out in self.outs})
        hint = f"did you mean {', '.join(near)}?" if near else f"results are in {', '.join(folders)}"
        raise UserError(f"{place}: {what}; {hint}")

    def node(self, path: str, digest: str) -> Node:
        """The artifact that had this hash at `path`, with everything below it."""
        if (path, digest) not in self._known:
            self._known[path, digest] = self._find(path, digest)
        return self._known[path, digest]

    def _find(self, path: str, digest: str) -> Node:
        state = self._state(path, digest)
        if path == rounds.ROUNDS and (last := self._closed_in(digest)):
            return Node(path, digest, state, inputs=(self._round(last),))
        if path == RAW and state == "as recorded":
            data = [(file.path, file.recorded) for file in self.project.tracked if file.path.startswith(f"{RAW}/")]
            below = [Node(name, value, self._state(name, value), notes=(f"tracked by {name}.dvc",))
                     for name, value in data if value]  # fmt: skip
            return Node(path, digest, state, inputs=tuple(below))
        own = _provenance(self.root / path) if state == "as recorded" else None  # has the reasons of exemptions
        record = own or self._maker(path, digest)
        if record is None and path in self.outs:
            note = "neither dvc.lock nor DVC's cache says how this was made; check out the commit that has it"
            return Node(path, digest, state, notes=(f"unknown: {note}",))
        return self._made(path, digest, state, record)

    def _round(self, number: int) -> Node:
        """A closed round, with what its policy and pairs were made from."""
        note, path = rounds.read_note(self.root, number), f"{rounds.ROUNDS}/{number}"
        inputs = []
        for name, out in ((rounds.POLICY, rounds.MODEL), (rounds.PAIRS, rounds.PREFERENCES)):
            place, value = rounds.path_in(number, name), note[name.partition(".")[0]]
            record = _provenance(self.root / place) or self._maker(out, value)
            inputs.append(self._made(place, value, self._state(place, value), record))
        about = f"round {number}, closed at commit {note['commit'][:DIGITS]}; tracked by {path}.dvc"
        digest = self.closed[number]
        return Node(path, digest, self._state(path, digest), inputs=tuple(inputs), notes=(about,))

    def _made(self, path: str, digest: str, state: State, record: Record | None, *notes: str) -> Node:
        """What this execution made (None: what no stage makes), with its inputs."""
        if record is None:
            return Node(path, digest, state, notes=notes)
        inputs = [
            self.node(name, value)
            for name, value in sorted(record.inputs.items())
            if name not in GATES and not (name == rounds.ROUNDS and self._closed_in(value) == 0)
        ]
        changed = tuple(
            name for name, value in sorted(record.code.items()) if self._state(name, value) != "as recorded"
        )
        exempt = (f"exempt from byte identity: {text}" for text in record.exemptions)
        return Node(path, digest, state, record, changed, (*self._origins(record), *inputs), (*notes, *exempt))

    def _origins(self, record: Record) -> Iterator[Node]:
        """A stage's inputs from outside the repository: the demo world, datasets and models of the hub."""
        block = record.params.get(record.stage)
        if not isinstance(block, Mapping):
            return
        if record.stage == "ingest" and block.get("source") == "demo":
            world = {name: value for name, value in record.code.items() if name.startswith(WORLD)}
            same = all(self._state(name, value) == "as recorded" for name, value in world.items())
            note = f"{WORLD}, seed {block.get('seed')}; the hash is of the code"
            state: State = "as recorded" if same else "changed since"
            yield Node("the built-in demo world", digest(world), state, notes=(note,))
        for name, key in (("huggingface", "dataset"), ("pretrained", "model")):
            source = block.get(name) if block.get("source") == name else None
            if isinstance(source, Mapping) and source.get("revision"):
                note = "from the Hugging Face hub, at this revision"
                yield Node(str(source.get(key)), str(source["revision"]), "unknown here", notes=(note,))

    def _state(self, path: str, digest: str) -> State:
        """How the workspace's content at `path` compares with this hash."""
        found = self.project.hash_at(self.root / path)
        return "missing" if found is None else "as recorded" if found == digest else "changed since"

    def _maker(self, path: str, digest: str) -> Record | None:
        """The execution whose output at `path` has this hash, of dvc.lock now or in the commit of a closed round."""
        found = (made_by(records, path, digest) for records in (self.records, *self.past.values()))
        return next((record for record in found if record is not None), None)

    def _closed_in(self, digest: str) -> int | None:
        """How many rounds were closed when the folder rounds had this hash; None where that is not recorded."""
        for number, records in self.past.items():
            if any(record.inputs.get(rounds.ROUNDS) == digest for record in records.values()):
                return number - 1
        now = self.project.hash_at(self.root / rounds.ROUNDS)
        return len(self.closed) if digest == now or not self.closed else None


def _provenance(folder: Path) -> Record | None:
    """The record beside a model folder."""
    own = provenance.read(folder)
    return Record(outs={}, source="provenance.json", **{key: own[key] for key in provenance.KEYS}) if own else None


def _lines(node: Node, first: str, rest: str, width: int, seen: set[str]) -> Iterator[str]:
    """`first` is the prefix of the node's own line, `rest` that of every line below it. An execution that made several
    artifacts is shown once."""
    record = node.record
    run = repr((record.stage, record.inputs, record.code, record.params)) if record else ""
    shown = run in seen
    maker = f"  made by {record.stage}{' (see above)' if shown else ''}" if record else ""
    yield f"{first}{node.path}  {node.digest[:DIGITS]}  {node.state}{maker}"
    about = []
    if record and not shown:
        seen.add(run)
        params = {name: value for name, value in dotted(record.params).items() if value not in (None, [], "")}
        about.append(f"recorded in {record.source}")
        about.append(" ".join(f"{key}={shorten(str(value).replace(' ', ''))}" for key, value in sorted(params.items())))
    if node.code_changed and not shown:
        more = f" and {len(node.code_changed) - 3} more" if len(node.code_changed) > 3 else ""
        about.append(f"its code has changed since: {', '.join(node.code_changed[:3])}{more}")
    bar = f"{rest}│ " if node.inputs and not shown else f"{rest}  "
    for line in (*about, *node.notes):
        yield from textwrap.wrap(line, width, initial_indent=bar, subsequent_indent=f"{bar}  ", break_on_hyphens=False)
    for child in () if shown else node.inputs:
        branch, below = ("└─ ", "   ") if child is node.inputs[-1] else ("├─ ", "│  ")
        yield from _lines(child, rest + branch, rest + below, width, seen)
