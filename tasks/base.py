"""Stage `base`: the tokenizer and the base model, from scratch or pretrained. With `ingest` the only stage that may
touch a network."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import complete, encode_prompt, encode_response, read_tokenizer, train_bpe
from rlhf_core.errors import UserError
from rlhf_core.gguf import gguf_in, load_gguf
from rlhf_core.models.hf import Log, build_llama, context_length, fit_vocabulary, load_causal_lm, save_checkpoint
from rlhf_core.models.sampling import require_cache
from rlhf_core.pretrain import pretrain
from tasks.datasets.raw import PRETRAINED, as_noted, below_raw, require_hub_id
from tasks.params.base import BaseParams, PretrainedParams
from tasks.stage.long_rows import require_context
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts
from tasks.training.trainer_setup import last_means, training_run

DEMONSTRATIONS = "data/ingest/demonstrations.jsonl"
PAIRS = "data/ingest/pairs.jsonl"
RATINGS = "data/ingest/ratings.jsonl"
COMMIT = re.compile(r"[0-9a-f]{40}")

Document = tuple[Conversation, str]


def execute(stage: Stage[BaseParams]) -> None:
    """Make models/base and metrics/base.json."""
    run_ = training_run(stage, shown=["loss"])
    documents = training_documents(stage)
    model, tokenizer = _scratch(stage, documents) if stage.params.source == "scratch" else _pretrained(stage)
    require_context(stage, tokenizer, context_length(model))
    log: list[dict[str, float]] = []
    settings = stage.params.pretrain
    if settings is not None and settings.steps > 0:
        ids = [encode_prompt(tokenizer, p) + encode_response(tokenizer, r) for p, r in documents]
        log = pretrain(model, ids, settings, context_length(model), run_)
    save_checkpoint(stage.out("models/base"), model.cpu(), tokenizer)
    stage.write_metrics(
        {
            "parameters": sum(p.numel() for p in model.parameters()),
            "vocabulary": len(tokenizer),
            "context": context_length(model),
            "steps": sum("loss" in row for row in log),
            **(last_means(log) if log else {"train_loss": None}),
        }
    )


def training_documents(stage: Stage[BaseParams]) -> list[Document]:
    """Prompts and answers of the training split: demonstrations, rated answers, and both responses of the pairs in the
    data, each once. Pairs of `ingest.labels` are left out: new labels must not change the model whose answers they
    compare. Raises UserError where a tokenizer or a pretraining needs them, and there are none."""
    answers = [*stage.read(DEMONSTRATIONS), *stage.read(RATINGS)]
    found = [(row, row["response"]) for row in answers if row["split"] == "train"]
    for row in stage.read(PAIRS):
        if row["split"] == "train" and not row.get("from_labels"):
            found += [(row, row["chosen"]), (row, row["rejected"])]
    documents = {(row["prompt_id"], answer): (row["prompt"], answer) for row, answer in found}
    pretrain = stage.params.pretrain
    if not documents and (stage.params.source == "scratch" or (pretrain and pretrain.steps)):
        raise UserError(
            "base.source: scratch and base.pretrain learn from the answers of the data, and these have none (no "
            "demonstrations for SFT, pairs or ratings); set base.source: pretrained and base.pretrain.steps: 0"
        )
    return list(documents.values())


def _scratch(
    stage: Stage[BaseParams], documents: Sequence[Document]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    scratch = stage.params.scratch
    assert scratch is not None  # the parameters' own check
    texts = [text for prompt, answer in documents for text in [*(m["content"] for m in prompt), answer]]
    pad, eos, plain = stage.params.pad_token, stage.params.eos_token, stage.params.format == "text"
    tokenizer = train_bpe(texts, scratch.vocabulary, pad, eos, scratch.context, plain)
    model = build_llama(scratch, tokenizer, stage.seed)
    stage.log(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer):,}, from scratch")
    return model, tokenizer


def _pretrained(stage: Stage[BaseParams]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    settings = stage.params.pretrained
    assert settings is not None  # the parameters' own check
    source = _locate(settings, stage.root, stage.read_json(PRETRAINED))
    return load_pretrained(
        source,
        settings.revision,
        stage.params.pad_token,
        plain=stage.params.format == "text",
        template_values=stage.params.chat_template_kwargs,
        trust_remote_code=trusts(stage),
        log=stage.log,
    )


def load_pretrained(
    source: Path | str,
    revision: str | None = None,
    pad_token: str = "<|pad|>",
    *,
    plain: bool = False,
    template_values: Mapping[str, bool | int | str] = MappingProxyType({}),
    trust_remote_code: bool = False,
    log: Log = print,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in float32 and its tokenizer, repaired as `complete` does; `log` is called with the repairs.

    Args:
        source: a model folder, a GGUF file, a folder with one, or the id of the hub.
        revision: of the hub id.
        pad_token: is added to a tokenizer without a token for padding.
        plain: the model continues texts, without turns.
        template_values: fixed values of the chat template's variables.
        trust_remote_code: lets the folder's own Python code run.

    Raises UserError as `load_gguf`, `load_causal_lm`, `require_cache` and `complete`.
    """
    try:
        if isinstance(source, Path) and (gguf := gguf_in(source)):
            model, tokenizer = load_gguf(gguf, log)
        else:
            model = load_causal_lm(source, revision, trust_remote_code=trust_remote_code, log=log)
            tokenizer = read_tokenizer(source, revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"base.pretrained.model: cannot load {source}: {' '.join(str(error).split())}") from None
    require_cache(model)
    tokenizer, repairs = complete(tokenizer, pad_token, plain, template_values)
    for repair in repairs:
        log(f"tokenizer repaired: {repair}")
    fit_vocabulary(model, tokenizer)
    return model, tokenizer


def _locate(settings: PretrainedParams, root: Path, noted: dict[str, str]) -> Path | str:
    """A folder or GGUF file below data/raw/ as `ingest` has noted it, or a hub id with a pinned commit."""
    key = "base.pretrained.model"
    place = below_raw(root / "data" / "raw", settings.model, key)
    if place.exists() or noted:
        return as_noted(root / "data" / "raw", settings.model, noted, key)
    require_hub_id(settings.model, key)
    if not COMMIT.fullmatch(settings.revision or ""):
        raise UserError(
            f"base.pretrained: {settings.model} is nothing below data/raw/, and a hub id needs the full commit hash "
            "as revision (a branch name moves)"
        )
    return settings.model
