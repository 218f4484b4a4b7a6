"""What test_divided.py starts in one or two processes: SFT, a reward model or DPO of a tiny model; the main process
saves the log, the weights, and the memory of its part of them."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers.models.llama.modeling_llama import LlamaMLP

sys.path.insert(0, str(Path(__file__).parents[1]))
import conftest

from rlhf_core.config.dpo import DPOConfig
from rlhf_core.config.reward import RewardConfig
from rlhf_core.config.sft import SFTConfig
from rlhf_core.dpo import dpo_objective, reference_logprobs, train_on_pairs
from rlhf_core.models import sharded_files, sharding
from rlhf_core.reward import Comparison, train_reward_model
from rlhf_core.sft import Demonstration, fine_tune
from rlhf_core.training import loop
from rlhf_core.training.processes import Processes
from rlhf_core.training.run import Run

COMMON = {"learning_rate": 1e-2, "warmup_steps": 1, "weight_decay": 0.1, "epochs": 2, "max_tokens": 64}
ROWS = [Demonstration([3, 5 + i % 4, 4], [*((10 + i + k) % 40 + 8 for k in range(1 + i % 9)), 1]) for i in range(19)]
COMPARISONS = [
    Comparison(
        [3, 5 + i % 5, 4],
        [[30, 10 + i, 1], [11 + i, 12], [13 + i, 30, 14, 15, 1], [20 + i % 3, 1]][: 2 + i % 3],
        [(0, 1), (2, 1), (2, 3), (0, 3)][: 1 + i % 3],
    )
    for i in range(11)
]


def main(folder: Path, options: dict[str, Any]) -> None:
    """Train, and write `run.pt`."""
    torch.set_num_threads(1)
    processes = Processes("fsdp")
    run = Run(
        Path(options.get("state", folder / "state")),
        0,
        lambda *_: None,
        checkpoint_every=2,
        precision=options.get("precision", "float32"),
        processes=processes if processes.divides_models else None,
    )
    seen = watch()
    if options.get("die") and not processes.is_main:
        die_while_saving()
    if options.get("fails") and not processes.is_main:
        run_out_of_memory()
    model, log = TRAININGS[options["what"]](run, {"lora": options.get("lora")})
    if processes.is_main:
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        found = seen | {"log": log, "saved": weights, "processes": processes.count}
        torch.save(found, folder / "run.pt")


def sft(run: Run, changes: dict[str, Any]) -> tuple[Any, list[dict[str, float]]]:
    values = {
        "batch_size": 8,
        "micro_batch_size": 2,
        "evaluate_every": 2,
        "patience": 0,
    }
    model = conftest.tiny_lm()
    result = fine_tune(model, ROWS[2:], ROWS[:2], SFTConfig(**COMMON | values | changes), 0, run)
    return model, [*result.log, {"best": result.best_step, "base": result.base_validation_loss}]


def reward(run: Run, changes: dict[str, Any]) -> tuple[Any, list[dict[str, float]]]:
    model = conftest.tiny_scalar()
    config = RewardConfig(**COMMON | {"batch_size": 4} | changes)
    return model, train_reward_model(model, COMPARISONS, config, 0, run)


def dpo(run: Run, changes: dict[str, Any]) -> tuple[Any, list[dict[str, float]]]:
    model, config = conftest.tiny_lm(), DPOConfig(enabled=True, **COMMON | {"batch_size": 4} | changes)
    references = reference_logprobs(model, COMPARISONS, 0)
    return model, train_on_pairs(model, COMPARISONS, references, config, dpo_objective(config), 0, run, "dpo")


TRAININGS = {"sft": sft, "reward": reward, "dpo": dpo}


def watch() -> dict[str, list[Any]]:
    """At each step: bytes of this process' part of the trained weights and of the moments, and the whole gradient."""
    seen: dict[str, list[Any]] = {"weights": [], "moments": [], "gradients": []}
    optimizers: list[torch.optim.Optimizer] = []
    build, clip = torch.optim.AdamW, loop.clip_gradients

    def built(*arguments: Any, **options: Any) -> torch.optim.Optimizer:
        optimizers.append(build(*arguments, **options))
        optimizers[-1].register_step_post_hook(lambda optimizer, *_: note_bytes(optimizer))
        return optimizers[-1]

    def note_bytes(optimizer: torch.optim.Optimizer) -> None:
        seen["weights"].append(own_bytes(p for group in optimizer.param_groups for p in group["params"]))
        seen["moments"].append(own_bytes(v for state in optimizer.state.values() for v in state.values() if v.dim()))

    def watched(parameters: Any, most: float) -> float:
        gradients = sharding.gathered({str(i): p.grad for i, p in enumerate(parameters) if p.grad is not None})
        seen["gradients"].append(torch.cat([gradient.flatten() for gradient in gradients.values()]))
        return clip(parameters, most)

    torch.optim.AdamW = built  # type: ignore[misc, assignment]
    loop.clip_gradients = watched
    return seen


def run_out_of_memory() -> None:
    """Once, in the fourth pass of this process with a gradient: in a layer."""
    forward, passes = LlamaMLP.forward, iter(range(10**6))

    def fail(self: LlamaMLP, hidden: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and next(passes) == 3:
            raise RuntimeError("not enough memory: you tried to allocate 8 bytes")
        return forward(self, hidden)

    LlamaMLP.forward = fail


def own_bytes(tensors: Any) -> int:
    """Bytes of this process' parts."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def die_while_saving() -> None:
    """A kill of this process while the others write their parts of the second checkpoint."""
    write, calls = sharded_files.write, iter(range(10**6))

    def die_or_write(folder: Path, tensors: Any) -> None:
        if next(calls) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        write(folder, tensors)

    sharded_files.write = die_or_write


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
