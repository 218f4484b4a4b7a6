"""`leash audit`: measures the `ppo` block of a parameter file on problems whose optimum is known."""

import sys
import time
from collections.abc import Iterable, Mapping
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


def audit_file(path: Path = PARAMS_FILE, method: str = "ppo") -> dict[str, Any]:
    """The audit of the file's block `ppo`, or of a method that runs PPO's loop with other settings; progress goes to
    stderr. Raises UserError for a file that is no valid parameter file, and for another method."""
    params = parse(Params, read_yaml(path), file=path)
    config = settings_of(params, method, path)
    printed = 0.0

    def show(problem: Problem, step: int, steps: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= PROGRESS_SECONDS or step == steps:
            printed = now
            print(f"audit {problem.name} step {step}/{steps}", file=sys.stderr, flush=True)

    return audit(config, params.seed, show)


def settings_of(params: Any, method: str, path: Path) -> PPOConfig:
    """The settings of PPO's loop for `ppo` or a variant of it."""
    if method == "ppo":
        return params.ppo  # type: ignore[no-any-return]
    if method not in VARIANTS:
        raise UserError(f"--method {method}: the audit is for ppo, {', '.join(VARIANTS)}")
    try:
        return getattr(params, method).applied_to(params.ppo, method)  # type: ignore[no-any-return]
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def render(found: Mapping[str, Any]) -> str:
    """The findings as tables and sentences."""
    parts = [
        f"total variation to π* = π_ref·exp(R/β)/Z (worst of the problems): {found['total_variation']:.4f}",
        f"bias of the gradient (worst, relative L2): {found['gradient_bias']:.2g}",
        _problems(found["problems"]),
        _biases(found["problems"]),
        _lines("what the settings do to the optimum:", found["remarks"]),
        _changed(found["changed_keys"]),
        _refused(found["refused"]),
    ]
    return "\n\n".join(filter(None, parts))


def _problems(problems: Mapping[str, Mapping[str, Any]]) -> str:
    head = (
        "problem",
        "responses",
        "TV to π*",
        "TV at start",
        "TV to resting point",
        "KL (of π*)",
        "reward (of π*)",
        "β",
    )
    rows = [
        (
            name,
            str(one["responses"]),
            f"{one['total_variation']:.4f}",
            f"{one['total_variation_of_reference']:.4f}",
            _number(one["total_variation_to_resting_point"], ".4f"),
            f"{one['kl']:.3f} ({one['kl_of_optimum']:.3f})",
            f"{one['reward']:.3f} ({one['reward_of_optimum']:.3f})",
            f"{one['kl_coef']:.3g}",
        )
        for name, one in problems.items()
    ]
    resting = (
        "The resting point is where the settings, entropy bonus, discount and place of the KL included, lead an ideal "
        "critic; without these it is π*."
    )
    return f"{table([head, *rows])}\n{resting}"


def _biases(problems: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [("gradient bias", "at", "critic as it is", "exact critic", "cosine")]
    for name, one in problems.items():
        for place, bias in one["gradient_bias"].items():
            rows.append(
                (
                    name,
                    place.replace("_", " "),
                    f"{bias['critic']['relative_l2']:.2g}",
                    f"{bias['exact_critic']['relative_l2']:.2g}",
                    f"{bias['critic']['cosine']:.4f}",
                )
            )
    return table(rows)


def _changed(changed: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [("changed for the audit", "yours", "audit")]
    for key, change in changed.items():
        values = list(change["audit"].values())
        shown = str(values[0]) if len(set(values)) == 1 else ", ".join(f"{v} ({k})" for k, v in change["audit"].items())
        rows.append((key, str(change["yours"]), shown))
    return table(rows)


def _refused(refused: list[Mapping[str, Any]]) -> str:
    rows = [("refused", "TV to π*", "gradient bias", "KL estimated (true)")]
    for one in refused:
        measured = one["measured"] or {}
        kl = f"{measured['kl_estimate']:.2f} ({measured['kl']:.2f})" if measured else "-"
        rows.append(
            (
                _combination(one["combination"]),
                _number(measured.get("total_variation"), ".3f"),
                _number(measured.get("gradient_bias"), ".2f"),
                kl,
            )
        )
    reasons = (f"{_combination(one['combination'])}: {one['reason']}" for one in refused)
    return f"{table(rows)}\n{_lines('why:', reasons)}"


def _combination(combination: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in combination.items())


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _lines(title: str, lines: Iterable[str]) -> str:
    shown = [f"  {line}" for line in lines]
    return "\n".join([title, *shown]) if shown else ""
