"""One check of `gpu_check.py`, in a process of its own. Writes its result to result.json in the folder it is given.

python benchmarks/gpu_case.py CASE-AS-JSON FOLDER [PART]
"""

import gc
import hashlib
import json
import math
import os
import platform
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_check import Case
from gpu_speed import Clock, peak_flops, phases_of
from gpu_trainer import STEPS, build
from torch import Tensor

from rlhf_core.ppo.objective import Pass
from rlhf_core.ppo.plan import StepPlan
from rlhf_core.ppo.trainer import PPOTrainer, RatioError, require_same_policy
from rlhf_core.training import state as checkpoint
from rlhf_core.training.checkpoints import Checkpoints

MISMATCH_RMS = {"float32": 1e-3, "bfloat16": 3e-2}
"""Largest root mean square of log π_engine − log π_old over the sampled tokens, nats. A wrong position or mask moves
the log-probabilities of these models by about half a nat."""
GRADIENT_ERROR = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest relative L2 norm of the difference between the policy's gradient and that of plain float32."""


class CheckError(Exception):
    """A check that failed, with what was measured up to then."""

    def __init__(self, problem: str, figures: Mapping[str, Any]) -> None:
        super().__init__(problem)
        self.figures = figures


def main() -> None:
    """Run the check and write `result.json`; with PART, run that part of it."""
    case, folder, *part = sys.argv[1:]
    chosen = Case(**json.loads(case))
    if part:
        run_part(chosen, Path(folder), part[0])
        return
    result: dict[str, Any] = {"problem": None}
    try:
        result["figures"] = CHECKS[chosen.check](chosen, Path(folder))
    except CheckError as error:
        result |= {"problem": str(error), "figures": error.figures}
    except Exception as error:  # whatever it is, it is a row of the table
        traceback.print_exc()
        result |= {"problem": f"{type(error).__name__}: {error}", "figures": {}}
    result["environment"] = environment()
    (Path(folder) / "result.json").write_text(json.dumps(result), encoding="utf-8")


def environment() -> dict[str, Any]:
    """What the figures were measured on."""
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else "CPU, toy sizes",
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
    }


def check_step(case: Case, folder: Path) -> dict[str, Any]:
    """Two PPO steps: ratio 1 at each first update, the engine's mismatch; memory and speed of the second step.
    Raises CheckError."""
    trainer = build(case)
    reward, precision = trainer.scoring.source.scorer.model, trainer.models.precision
    clock, first = Clock(trainer), FirstRatio(precision)
    for _ in range(STEPS):
        start_peak()
        clock.start()
        row = trainer.step(watch=first)
        clock.stop()
    mismatch = math.sqrt(2.0 * max(0.0, float(row["engine_mismatch_k3"] or 0.0)))
    figures: dict[str, Any] = {
        "model": case.model,
        "precision": precision,
        "first_ratio_gap_max": max(first.gaps, default=math.nan),
        "engine_mismatch_max": row["engine_mismatch_max"],
        "engine_mismatch_rms": mismatch,
        **peak_bytes(),
        "phases": phases_of(trainer, reward, clock, peak_flops(environment()["device"], precision)),
    }
    figures["finding"] = (
        f"log π: update to rollout {figures['first_ratio_gap_max']:.1e} (largest), engine {mismatch:.1e} (RMS)"
    )
    problem = first.problem
    if problem is None and not mismatch <= MISMATCH_RMS[precision]:
        problem = f"the engine's log π differs by {mismatch:.1e} (RMS), allowed is {MISMATCH_RMS[precision]:g}"
    if problem is not None:
        raise CheckError(problem, figures)
    return figures


def check_gradient(case: Case, folder: Path) -> dict[str, Any]:
    """The policy's gradient with the settings of the case against that of plain float32, on one rollout, before any
    update. Raises CheckError."""
    one_step = {"minibatches": 1, "ppo_epochs": 1, "optimizer": {"max_grad_norm": 1e9}}
    plain = build(replace(case, changes=one_step))
    rollout = plain.rollout()
    expected = gradient_of(plain, lambda: plain.step(rollout))  # noqa: F821, deleted below
    del plain
    gc.collect()
    other = build(replace(case, changes={**case.changes, **one_step}))
    for rows in other.micro_batches(rollout, range(len(rollout.texts)), StepPlan.of(other.config, 0)):
        batch = rollout.batch(rows, other.pad_id)
        rollout.old_logprobs[rows, : batch.time] = batch.spread(
            other.models.compare(batch, other.config.temperature)[0].logprobs
        )
    found = gradient_of(other, lambda: other.step(rollout))
    error = relative_error(found, expected)
    limit = GRADIENT_ERROR[other.models.precision]
    figures = {
        "model": case.model,
        "gradient_error": error,
        "finding": f"relative L2 error of the gradient {error:.1e}, allowed is {limit:g}",
    }
    if not error <= limit:
        raise CheckError(figures["finding"], figures)
    return figures


def gradient_of(trainer: PPOTrainer, update: Callable[[], object]) -> list[Tensor]:
    """The policy's gradient at the first optimiser step of `update`, on the CPU."""
    found: list[Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        found.extend(p.grad.detach().float().cpu() for p in parameters if p.grad is not None)

    hook = trainer.optimizers["policy"].register_step_pre_hook(keep)
    update()
    hook.remove()
    return found


def relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """‖found − expected‖ / ‖expected‖ over all tensors; infinite where they do not match."""
    if [each.shape for each in found] != [each.shape for each in expected] or not expected:
        return math.inf
    gap = sum((a - b).square().sum(dtype=torch.float64).item() for a, b in zip(found, expected, strict=True))
    return math.sqrt(gap / sum(each.square().sum(dtype=torch.float64).item() for each in expected))


def check_bytes(case: Case, folder: Path) -> dict[str, Any]:
    """Three processes: one runs two steps, one is killed in its second step, one continues from the checkpoint of the
    killed one. Weights and figures after each step are the same bytes. Raises CheckError."""
    digests = {part: part_digests(case, folder, part) for part in ("whole", "killed", "continued")}
    figures = {"model": case.model, "digests": digests}
    first, second = digests["whole"]
    if digests["killed"] != [first]:
        raise CheckError("two runs differ after the first step", figures)
    if digests["continued"] != [second]:
        raise CheckError("a killed and continued run differs from a whole one", figures)
    return figures | {"finding": "two runs, and a killed and continued one, have the same bytes"}


def part_digests(case: Case, folder: Path, part: str) -> list[str]:
    """The digests that one process writes. Raises RuntimeError where it does not end as planned."""
    command = [sys.executable, str(Path(__file__).resolve()), json.dumps(asdict(case)), str(folder), part]
    expected = -signal.SIGKILL if part == "killed" else 0
    if (code := subprocess.run(command, check=False).returncode) != expected:
        raise RuntimeError(f"the process {part!r} ended with status {code}, expected was {expected}")
    digests: list[str] = json.loads((folder / f"{part}.json").read_text(encoding="utf-8"))
    return digests


def run_part(case: Case, folder: Path, part: str) -> None:
    """A process of `check_bytes`; the digest after each of its steps goes to `<part>.json`."""
    trainer = build(case)
    kept, digests = Checkpoints(folder / "checkpoints"), []
    if part == "continued":
        state = checkpoint.load(kept)
        if state is None:
            raise RuntimeError("the killed process left no complete checkpoint")
        trainer.load_state_dict(state)
    watch = None
    while trainer.steps_done < STEPS:
        digests.append(digest(trainer, trainer.step(watch=watch)))
        (folder / f"{part}.json").write_text(json.dumps(digests), encoding="utf-8")
        if part == "killed":
            checkpoint.save(kept, trainer.steps_done, trainer.state_dict())

            def watch(*_: object) -> None:
                os.kill(os.getpid(), signal.SIGKILL)


def digest(trainer: PPOTrainer, row: Mapping[str, float | None]) -> str:
    """SHA-256 of the models' weights and of a step's figures."""
    found = hashlib.sha256(json.dumps(row).encode())
    for model, weights in sorted(trainer.models.state_dict().items()):
        for name, tensor in sorted(weights.items()):
            found.update(f"{model} {name}".encode())
            found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


CHECKS = {"step": check_step, "gradient": check_gradient, "bytes": check_bytes}


class FirstRatio:
    """Watches the first minibatch of each step: its ratio must be 1, within the limits of the product (rule 7)."""

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.gaps: list[float] = []
        """The largest |log π_θ − log π_old| of each pass, nats."""
        self.errors: list[str] = []

    def __call__(self, number: int, rows: Sequence[int], forward: Pass, losses: Mapping[str, Tensor]) -> None:
        """See `Watch`."""
        if number:
            return
        new, old, mask = forward.logprobs.detach(), forward.old_logprobs, forward.batch.mask
        self.gaps.append((new - old)[mask.bool()].abs().max().item())
        try:
            require_same_policy(new, old, mask, self.precision)
        except RatioError as error:
            self.errors.append(str(error))

    @property
    def problem(self) -> str | None:
        """Why the ratio is not 1; None where it is."""
        return next(iter(self.errors), None if self.gaps else "no first minibatch was seen")


def start_peak() -> None:
    """Measure the peak of memory from here on; that of the process, without a GPU, is the one since its start."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> dict[str, int | None]:
    """Largest memory of the last step: allocated and reserved by torch on the GPU, or of the whole process without
    one."""
    if torch.cuda.is_available():
        return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    return {"peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "reserved_bytes": None}


if __name__ == "__main__":
    main()
