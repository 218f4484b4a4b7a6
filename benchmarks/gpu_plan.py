"""Planned peak memory of checks of `gpu_check.py`, in a process of its own: the planner replaces parts of torch.

python benchmarks/gpu_plan.py CASES-AS-JSON FOLDER gpu|toy
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from gpu_check import Case
from gpu_trainer import GPU_WORK, TOY, TOY_WORK, config_of, precision_of, values_of

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import UserError
from rlhf_core.planning.ledger import require_support
from rlhf_core.planning.memory import Lengths, ppo_phases
from rlhf_core.planning.shapes import Shapes, planned_for


def main() -> None:
    """Write the plan of each case to a file in the folder, as soon as it is known."""
    cases, folder, size = sys.argv[1:]
    for case in (Case(**values) for values in json.loads(cases)):
        try:
            found: dict[str, Any] = {"bytes": planned_bytes(case, gpu=size == "gpu"), "reason": ""}
        except (ImportError, UserError) as error:  # this torch, or these settings, are not planned
            found = {"bytes": None, "reason": str(error)}
        except Exception as error:  # whatever it is, the check itself has run
            traceback.print_exc()
            found = {"bytes": None, "reason": f"{type(error).__name__}: {error}"}
        part = Path(folder, f"{case.plan}.part")
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(Path(folder, f"{case.plan}.json"))


def planned_bytes(case: Case, gpu: bool) -> int:
    """Bytes at the peak of a PPO step after the first, with the longest rows. Raises ImportError where the planner does
    not support this torch, and UserError for settings that it does not support."""
    require_support()
    work, precision = GPU_WORK if gpu else TOY_WORK, precision_of(case)
    sizes: dict[str, Any] = {} if gpu else TOY
    policy = config_of(case.model, **sizes)
    other = config_of(case.reward, **sizes | {"vocab_size": policy.vocab_size}) if case.reward else None
    config = PPOConfig.model_validate(values_of(case, work, gpu))
    with planned_for(accelerator=gpu):
        scorer = Shapes(other, precision=precision).scalar_model(precision) if other else None
        shapes, lengths = Shapes(policy, precision=precision), Lengths(work.prompt, work.response)
        phases = ppo_phases(shapes, config, lengths, scorers=0 if scorer else 1)
    weights = sum(parameter.nbytes for parameter in scorer.parameters()) if scorer else 0
    return max(phase.peak for phase in phases) + weights


if __name__ == "__main__":
    main()
