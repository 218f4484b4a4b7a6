"""Writes docs/reference/models.md from what really ran; the tests compare each row with the page.

python -m tests.architectures.page --write
"""

import sys
import tempfile
from pathlib import Path

from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import complete, encode_prompt
from rlhf_core.errors import UserError
from tests.architectures.chain import Chain
from tests.architectures.kinds import KINDS
from tests.architectures.zoo import ROWS, download

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
HEADER = """# Model architectures
Which pretrained models (`base.source: pretrained`) run through the whole pipeline. Other architectures of transformers
may work; what cannot work is refused in one line.

The tests make this page (`python -m tests.architectures.page --write`). For each row a tiny random model and a
tokenizer of its kind run on the CPU in float32: SFT, reward model, PPO (own critic, shared critic, LoRA), evaluation.
Real weights of these architectures were not run.

"""
PARTS = {
    "sft": "SFT",
    "reward": "reward model",
    "ppo": "PPO, own critic",
    "shared": "PPO, shared critic",
    "lora": "PPO, LoRA",
    "evaluate": "evaluation",
}
HEAD = ["architecture", "tokenizer", "runs", "packed rows", "remarks"]
EXPLANATION = """
Packed rows: equal prefixes are computed once, without padding; the other models are read with padding, to the same
numbers. With LoRA (`all-linear`) the weights of experts stay frozen. No auxiliary loss balances the experts.

Each row is also checked for these points:

- The sampler's log-probabilities are those of a plain forward pass (1e-4 nats), and the first PPO ratio is 1.
- Nothing is random in training mode, and a run continued from a checkpoint ends in equal bytes.
- Policy, reward model and critic load with the plain AutoModel classes and give the same numbers.

## What is read, and what `base` changes
The log of `base` names each change.

- **Weights.** Refused: a weight that is missing or has another shape than in config.json, own layers that config.json
  leaves out, and a tied output layer with other weights than the embedding. `value_head` and `v_head` (OpenRLHF, TRL)
  are read as the head of a reward model, which is refused as a language model.
- **GGUF.** Read are the architectures `llama` (also Mistral's), `qwen2` and `qwen3` with a byte-level tokenizer
  (`gpt-2`, `smollm`, `qwen2`, `llama-bpe`), as float32. All else is refused, such as the `rope_freqs` of Llama 3.1.
- **Date.** A chat template that writes today's date is fixed to 26 Jul 2024, or refused where that is impossible.
- **End of an answer.** The control token with which the chat template closes an answer becomes the tokenizer's eos
  token, also in training data. Sampling stops at it, at every eos token of `generation_config.json`, and at
  `stop_tokens`. A template that closes with text only changes nothing.
- **Padding.** A tokenizer without a pad token gets a control token that has no use, else `base.pad_token`.
- **Chat template.** A tokenizer without one gets ChatML if it has the tokens of ChatML, else Leash's with three tokens
  for roles.

## Tokenizers
Which prompts the chat templates take. A refused prompt is an error that names its row, before any training.

"""
TURNS: dict[str, Conversation] = {
    "one turn": [{"role": "user", "content": "Eggs?"}],
    "system message": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Eggs?"}],
    "several turns": [
        {"role": "user", "content": "Eggs?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "How?"},
    ],
}


def row_of(name: str, chain: Chain) -> str:
    """The row of an architecture whose chain has run."""
    row = ROWS[name]
    missing = PARTS.keys() - chain.passed
    runs = "all" if not missing else ", ".join(PARTS[part] for part in PARTS if part in chain.passed) or "nothing"
    packed = {True: "yes", False: "no", None: "—"}[chain.packs]
    remarks = "; ".join(filter(None, [row.detail, *chain.repairs, *map("refused: {}".format, chain.refusals.values())]))
    return line([row.title, f"`{row.tokenizer}`", runs, packed, remarks])


def tokenizer_row(kind: str) -> str:
    """What a tokenizer is, and which prompts it takes."""
    tokenizer, _ = complete(KINDS[kind](), "<|pad|>")
    cells = []
    for prompt in TURNS.values():
        try:
            encode_prompt(tokenizer, prompt)
            cells.append("yes")
        except UserError:
            cells.append("refused")
    about = " ".join((KINDS[kind].__doc__ or "").split()).rstrip(".")
    return line([f"`{kind}`", about, *cells])


def line(cells: list[str]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "\\<") for cell in cells) + " |"


def page(rows: list[str]) -> str:
    """The whole page around the rows of the architectures."""
    kinds = [tokenizer_row(kind) for kind in KINDS]
    models = [line(HEAD), "|" + "---|" * len(HEAD), *rows]
    tokenizers = [line(["tokenizer", "kind", *TURNS]), "|" + "---|" * (2 + len(TURNS)), *kinds]
    return HEADER + "\n".join(models) + "\n" + EXPLANATION + "\n".join(tokenizers) + "\n"


def run(name: str, folder: Path) -> Chain:
    """The chain of an architecture."""
    download(name, folder / "pretrained")
    return Chain(folder).run()


def write() -> None:
    """Run every architecture and write the page."""
    rows = []
    for name in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row_of(name, run(name, Path(folder))))
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.architectures.page --write")
    write()
