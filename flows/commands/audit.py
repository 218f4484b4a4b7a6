"""`leash audit`: measures the `ppo` block of a parameter file on problems whose optimum is known."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.text import table
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import UserError
from rlhf_core.inspect.audit.problems import Problem
from rlhf_core.inspect.audit.run import audit
from tasks.params.all import Params
from tasks.params.loader import PARAMS_FILE, parse, read_yaml
from tasks.params.methods import VARIANTS

PROGRESS_SECONDS = 3.0
PROBLEMS = (
    "problem",
    "responses",
    "TV to π*",
    "TV at start",
    "TV to resting point",
    "KL (of π*)",
    "reward (of π*)",
    "β",
)
RESTING = (
    "The resting point is where the settings, entropy bonus, discount and place of the KL included, lead an ideal "
    "critic; without these it is π*."
)


def audit_file(path: Path = PARAMS_FILE, method: str = "ppo") -> dict[str, Any]:
    """The audit of the file's block `ppo`, or of a method that runs PPO's loop with other settings; progress goes to
    stderr. Raises UserError for a file that is no valid parameter file, and for another method."""
    params: Any = parse(Params, read_yaml(path), file=path)
    config: PPOConfig = params.ppo
    if method != "ppo":
        if method not in VARIANTS:
            raise UserError(f"--method {method}: the audit is for ppo, {', '.join(VARIANTS)}")
        try:
            config = getattr(params, method).applied_to(config, method)
        except ValueError as error:
            raise UserError(f"{path}: {error}") from None
    printed = 0.0

    def show(problem: Problem, step: int, steps: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= PROGRESS_SECONDS or step == steps:
            printed = now
            print(f"audit {problem.name} step {step}/{steps}", file=sys.stderr, flush=True)

    return audit(config, params.seed, show)


def render(found: Mapping[str, Any]) -> str:
    """The findings as tables and sentences."""
    problems: list[tuple[str, ...]] = [PROBLEMS]
    biases = [("gradient bias", "at", "critic as it is", "exact critic", "cosine")]
    for name, one in found["problems"].items():
        distances = ("total_variation", "total_variation_of_reference", "total_variation_to_resting_point")
        kl = f"{one['kl']:.3f} ({one['kl_of_optimum']:.3f})"
        reward = f"{one['reward']:.3f} ({one['reward_of_optimum']:.3f})"
        cells = (*(_number(one[key], ".4f") for key in distances), kl, reward, f"{one['kl_coef']:.3g}")
        problems.append((name, str(one["responses"]), *cells))
        for place, bias in one["gradient_bias"].items():
            sizes = (f"{bias[critic]['relative_l2']:.2g}" for critic in ("critic", "exact_critic"))
            biases.append((name, place.replace("_", " "), *sizes, f"{bias['critic']['cosine']:.4f}"))

    changed = [("changed for the audit", "yours", "audit")]
    for key, change in found["changed_keys"].items():
        values = list(change["audit"].values())
        each = ", ".join(f"{value} ({problem})" for problem, value in change["audit"].items())
        changed.append((key, str(change["yours"]), str(values[0]) if len(set(values)) == 1 else each))

    refused, reasons = [("refused", "TV to π*", "gradient bias", "KL estimated (true)")], []
    for one in found["refused"]:
        combination = ", ".join(f"{key}: {value}" for key, value in one["combination"].items())
        measured = one["measured"] or {}
        distance, bias = measured.get("total_variation"), measured.get("gradient_bias")
        kl = f"{measured['kl_estimate']:.2f} ({measured['kl']:.2f})" if measured else "-"
        refused.append((combination, _number(distance, ".3f"), _number(bias, ".2f"), kl))
        reasons.append(f"  {combination}: {one['reason']}")

    remarks = [f"  {line}" for line in found["remarks"]]
    parts = [
        f"total variation to π* = π_ref·exp(R/β)/Z (worst of the problems): {found['total_variation']:.4f}",
        f"bias of the gradient (worst, relative L2): {found['gradient_bias']:.2g}",
        f"{table(problems)}\n{RESTING}",
        table(biases),
        "\n".join(["what the settings do to the optimum:", *remarks]) if remarks else "",
        table(changed),
        "\n".join([table(refused), "why:", *reasons]),
    ]
    return "\n\n".join(filter(None, parts))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
