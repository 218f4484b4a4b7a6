"""One execution of a stage: its parameters, checked inputs, state folder, outputs, progress and tracking."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import Field

from rlhf_core.config.block import Block
from rlhf_core.config.precision import Precision
from tasks.datasets.jsonl import Row
from tasks.params.loader import parse
from tasks.params.runtime import RuntimeParams
from tasks.stage.interrupts import Interrupts
from tasks.stage.journal import Journal
from tasks.stage.outputs import Outputs, rounded
from tasks.stage.progress import Progress, Watch
from tasks.tracking.record import Live

Model = TypeVar("Model", bound=Block)
Settings = TypeVar("Settings", bound=Block)
Item = TypeVar("Item")


class Common(Block):
    """What all stages share."""

    threads: int = Field(ge=1, le=256)
    seed: int = Field(ge=0, lt=2**32)
    long_rows: Literal["refuse", "drop"]
    trust_remote_code: bool = False
    precision: Precision = "float32"
    deterministic: bool = True
    runtime: RuntimeParams = RuntimeParams()


@dataclass
class Stage(Generic[Model]):
    """One execution of a stage, as its module receives it."""

    name: str
    key: str
    root: Path
    params: Model
    common: Common
    blocks: Mapping[str, Any]
    """The blocks of params.yaml that dvc.yaml names for this stage, as plain values."""
    state_dir: Path
    outputs: Outputs
    live: Live | None
    """The rows that MLflow shows; None where tracking is off, and in worker ranks."""
    label: str
    rows: Mapping[str, list[Row]]
    hashes: Mapping[str, str]
    """Content hash of every input, as DVC computes it."""
    interrupts: Interrupts
    exemptions: list[str] = field(default_factory=list)
    """Why the outputs may differ from those of another execution with equal inputs; filled by `exempt`."""
    warnings: list[str] = field(default_factory=list)
    """What `warn` has printed."""

    def __post_init__(self) -> None:
        self.watch = Watch(self.label, self.runtime.progress_seconds, self.warn)
        """Shows what slow loops report."""

    @property
    def seed(self) -> int:
        """Seed of training and sampling."""
        return self.common.seed

    @property
    def precision(self) -> Precision:
        """Of matrix products, and of the weights of models that are not trained."""
        return self.common.precision

    @property
    def runtime(self) -> RuntimeParams:
        """The parameters that cannot change a result."""
        return self.common.runtime

    def block(self, name: str, model: type[Settings]) -> Settings:
        """The block `name` of params.yaml as `model`, read when the stage started.

        Raises UserError for a wrong value, ValueError when dvc.yaml does not declare the block for this stage.
        """
        if name not in self.blocks:
            raise ValueError(f"{name} is not among the params of {self.name} in dvc.yaml")
        return parse(model, self.blocks[name], name)

    def read(self, path: str) -> list[Row]:
        """The validated rows of an input dataset. Raises ValueError when dvc.yaml does not declare it."""
        if path not in self.rows:
            raise ValueError(f"{path} is no dataset among the dependencies of {self.name} in dvc.yaml")
        return self.rows[path]

    def read_json(self, path: str) -> dict[str, Any]:
        """A JSON file of an earlier stage."""
        content: dict[str, Any] = json.loads((self.root / path).read_text(encoding="utf-8"))
        return content

    def out(self, path: str) -> Path:
        """Where to write an output; it is renamed when the stage has ended."""
        return self.outputs.path(path)

    def write_metrics(self, content: Mapping[str, Any]) -> None:
        """Write metrics/<stage>.json with `rounded` numbers, which go to MLflow when the stage has ended."""
        self.outputs.write_json(f"metrics/{self.name}.json", rounded(content))

    def progress(self, total: int, unit: str = "step", done: int = 0, reads: int = 0) -> Progress:
        """A reporter for a loop of `total` rounds, of which an earlier process has done `done`; `reads` as in
        `Progress`."""
        return self.watch.begin(total, unit, done, reads)

    def warn(self, text: str) -> None:
        """Print a warning, once, and keep it as a tag of the stage's run."""
        if text in self.warnings:
            return
        self.warnings.append(text)
        self.log(f"WARNING {text}")
        self.tag("leash.warnings", "; ".join(self.warnings))

    def exempt(self, why: str) -> None:
        """Record, print and tag why the outputs of this execution are exempt from byte identity."""
        if why in self.exemptions:
            return
        self.exemptions.append(why)
        self.log(f"WARNING {why}")
        self.tag("leash.exempt", "; ".join(self.exemptions))

    def resumed(
        self,
        name: str,
        batches: Sequence[Sequence[Item]],
        work: Callable[[Sequence[Item]], list[Any]],
        show: Callable[[list[Any]], dict[str, float | None]] = lambda _: {},
        unit: str = "sample",
        progress: Progress | None = None,
    ) -> list[Any]:
        """The results of `work` for all batches, one JSON value an item, in order. Batches that an earlier process
        finished are read from its journal in the state folder. `show` gives the metrics in the progress line.
        `progress`: of a longer loop, of which these items are the next rounds."""
        journal = Journal(self.state_dir / f"{name}.journal", self.log)
        done = [value for piece in journal.pieces for value in piece]
        if done:
            self.log(f"{name}: continues after {unit} {len(done)}")
        if progress is None:
            progress = self.progress(sum(map(len, batches)), unit, len(done))
        else:
            progress.unit = unit
            progress.skip(len(done))
        before = progress.done - len(done)
        with self.interrupts.deferred():
            for batch in batches[len(journal.pieces) :]:
                journal.append(work(batch))
                done += journal.pieces[-1]
                progress.update(before + len(done), **show(done))
                self.interrupts.leave()
        return done

    def log(self, text: str) -> None:
        """Print one line."""
        print(f"{self.label} {text}", flush=True)

    def track(self, values: Mapping[str, float | None], step: int) -> None:
        """Metrics of a step, which MLflow shows as `<stage>/<name>`."""
        if self.live:
            self.live.points({f"{self.name}/{name}": value for name, value in values.items()}, step)

    def tag(self, name: str, text: str) -> None:
        """A tag of the stage's run in MLflow."""
        if self.live:
            self.live.tag(name, text)
