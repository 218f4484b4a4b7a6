"""Peak memory of a loss over one long row, forward and backward: from a tensor of all logits, and in chunks of tokens.

    python benchmarks/logits_memory.py

Random hidden states and a random output layer of a large vocabulary, float32, on the CPU. Each measurement is a process
of its own; the peak is above that of the same process before the loss, and holds the layer's gradient.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
LOSSES = {"logprobs": "log-probabilities and entropy (PPO, SFT, DPO)", "exact_kl": "exact KL as a loss"}
FORMS = ("plain", "chunks")


def main() -> None:
    """Print a Markdown table; the last line is JSON."""
    options = arguments().parse_args()
    if options.form:
        print(json.dumps(measure(options)))
        return
    found = {loss: {form: child(options, loss, form) for form in FORMS} for loss in LOSSES}
    print(f"{options.tokens:,} tokens, vocabulary {options.vocabulary:,}, hidden size {options.hidden}\n")
    print("| loss, forward and backward | MiB above the start: plain | in chunks | seconds: plain | in chunks |")
    print("|---|---|---|---|---|")
    for loss, name in LOSSES.items():
        cells = [f"{found[loss][form][key]:,.{digits}f}" for key, digits in (("mib", 0), ("s", 1)) for form in FORMS]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print(json.dumps(found))


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--loss", choices=LOSSES, help=argparse.SUPPRESS)
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    return parser


def child(options: argparse.Namespace, loss: str, form: str) -> dict[str, float]:
    """Measure in a process of its own."""
    sizes = [f"--{name}={getattr(options, name)}" for name in ("tokens", "vocabulary", "hidden")]
    command = [sys.executable, str(HERE), *sizes, f"--loss={loss}", f"--form={form}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Mebibytes and seconds of one loss in one form, and its value."""
    sys.path.insert(0, str(HERE.parents[1]))
    import torch

    from rlhf_core.models.head import Head, Predictions
    from rlhf_core.models.token_logprobs import exact_kl, logprobs_and_entropy
    from rlhf_core.ppo.kl import estimate_kl

    torch.manual_seed(0)
    shape = (options.tokens, options.hidden)
    hidden, weight = torch.randn(shape).requires_grad_(), torch.randn(options.vocabulary, options.hidden)
    weight.mul_(options.hidden**-0.5).requires_grad_()
    policy, reference = Predictions(hidden, Head(weight)), Predictions(torch.randn(shape), Head(weight.detach()))
    actions = torch.randint(options.vocabulary, (options.tokens,))
    before, start = peak(), time.perf_counter()
    if options.loss == "exact_kl":
        plain = options.form == "plain"
        kl = estimate_kl(policy.logits(), reference.logits(), "full") if plain else exact_kl(policy, reference, 1.0)
        value = kl.mean()
    elif options.form == "plain":
        logprobs = policy.logits().log_softmax(dim=-1)
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        value = logprobs.gather(1, actions[:, None]).mean() + 0.01 * entropy.mean()
    else:
        logprobs, entropy = logprobs_and_entropy(policy, actions)
        value = logprobs.mean() + 0.01 * entropy.mean()
    value.backward()
    return {"mib": peak() - before, "s": time.perf_counter() - start, "value": value.item()}


def peak() -> float:
    """The largest resident memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
