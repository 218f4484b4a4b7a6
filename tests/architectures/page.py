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
from tests.architectures.zoo import ROWS, Architecture, download

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
HEADER = """# Model architectures
Which pretrained models (`base.source: pretrained`) run through the whole pipeline. This page is made by the tests: for
each row a tiny random model and a tokenizer of its kind run from `base` to `evaluate`, on the CPU in float32. Real
weights of these architectures were not run, and none of them was run on a GPU. Other architectures of transformers may
work; what cannot work is refused in one line.

The tests check in each row that the sampler's log-probabilities are those of a plain forward pass (1e-4 nats), that
nothing is random in training mode, that the first PPO ratio is 1, that a run continued from a checkpoint ends in equal
bytes, and that policy, reward model and critic load with the plain AutoModel classes and give the same numbers.

`python -m tests.architectures.page --write` makes the page again.

"""
PARTS = {
    "sft": "SFT",
    "reward": "reward model",
    "ppo": "PPO, own critic",
    "shared": "PPO, shared critic",
    "lora": "PPO, LoRA",
    "evaluate": "evaluation",
}
HEAD = ["architecture", "tokenizer", "output layer", *PARTS.values(), "packed rows", "remarks"]
EXPLANATION = """
`—`: not run, because an earlier part was refused. Packed rows: without padding, and equal prefixes are computed once;
the other models are read with padding, to the same numbers. LoRA (`all-linear`) adapts the linear layers of the body;
the weights of experts are no linear layers and stay frozen. No auxiliary loss balances the experts.

## What is read, and what `base` changes
- **Weights.** A weight that is missing, or has another shape than config.json says, is an error that names it, wherever
  a model is read. The prefixes `module.` and `_orig_mod.` (DistributedDataParallel, torch.compile) are removed; the
  heads `value_head` and `v_head` (OpenRLHF, TRL) are read as that of a reward model. A reward model is refused as a
  language model, whatever its head is called. Weights of the model's own layers that config.json leaves out, and an
  output layer that config.json ties to the embedding and that has other weights, are refused. Other tensors that have
  no place in the model, such as the `v_head` of a policy of TRL, are named in the log.
- **GGUF.** Settings, weights and tokenizer come from the file alone, for the architectures `llama` (as Mistral's files
  are called), `qwen2` and `qwen3` with a byte-level tokenizer (`gpt-2`, `smollm`, `qwen2`, `llama-bpe`). The
  weights become float32; the log says what they were. A setting, a weight or a tokenizer that is not read is an error
  that names it, such as the `rope_freqs` of Llama 3.1. transformers leaves such things out, and cuts the white space
  before numbers into other tokens than SmolLM2 was trained with.
- **Date.** A chat template that writes today's date would give other tokens tomorrow. The saved one writes 26 Jul 2024.
  A template that depends on the date in a way that cannot be fixed is refused.
- **End of an answer.** Answers close with the control token with which the chat template closes them, such as
  `<end_of_turn>` or `<|im_end|>`. It becomes the tokenizer's eos token. Sampling stops at it, at every eos token of
  `generation_config.json`, and at `stop_tokens`. A template that closes with text only leaves the eos token as it is.
  The reward model, and what is trained on samples, read the tokenizer's eos in place of another eos that closes an
  answer.
- **Padding.** A tokenizer without a pad token gets a control token that has no use and that no text makes, so that the
  vocabulary keeps its size; `base.pad_token` is added only where there is none.
- **Chat template.** A tokenizer without one gets ChatML if it has the tokens of ChatML, else Leash's with three tokens
  for roles.

The log of `base` says each change.

## Tokenizers
What the tokenizers in the table are, and which prompts their chat templates take. A refused prompt is an error that
names its row, before any training.

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
    parts = ["refused" if part in chain.refusals else "yes" if part in chain.passed else "—" for part in PARTS]
    packed = {True: "yes", False: "no", None: "—"}[chain.packs]
    remarks = "; ".join(filter(None, [row.detail, *chain.repairs, *map("refused: {}".format, chain.refusals.values())]))
    return line([row.title, f"`{row.tokenizer}`", output_layer(row), *parts, packed, remarks])


def output_layer(row: Architecture) -> str:
    """Whether its weights are the embeddings."""
    return "tied" if row.config(**row.settings).tie_word_embeddings else "own"


def tokenizer_row(kind: str) -> str:
    """What a tokenizer is, and which prompts it takes."""
    tokenizer, _ = complete(KINDS[kind](), "<|pad|>")
    cells = []
    for prompt in TURNS.values():
        try:
            encode_prompt(tokenizer, prompt)
            cells.append("yes")
        except UserError as error:
            cells.append("refused: " + str(error).split(": ", 1)[1].split(";")[0])
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
