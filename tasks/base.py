"""Stage `base`: the tokenizer and the base model, from scratch or pretrained. With `ingest` the only stage that may
touch a network."""

import re
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import complete, encode_prompt, encode_response, read_tokenizer, train_bpe
from rlhf_core.errors import UserError
from rlhf_core.models.hf import build_llama, context_length, fit_vocabulary, load_causal_lm, save_checkpoint
from rlhf_core.models.sampling import require_cache
from rlhf_core.pretrain import pretrain
from tasks.datasets.raw import PRETRAINED, below_raw, hashes_of_files, require_hub_id
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
    data. Pairs of `ingest.labels` are left out: new labels must not change the model whose answers they compare."""
    answers = [*stage.read(DEMONSTRATIONS), *stage.read(RATINGS)]
    documents: list[Document] = [(row["prompt"], row["response"]) for row in answers if row["split"] == "train"]
    for row in stage.read(PAIRS):
        if row["split"] == "train" and not row.get("from_labels"):
            documents += [(row["prompt"], row["chosen"]), (row["prompt"], row["rejected"])]
    return documents


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
    source, trust = _locate(settings, stage.root, stage.read_json(PRETRAINED)), trusts(stage)
    try:
        model = load_causal_lm(source, settings.revision, trust_remote_code=trust, log=stage.log)
        tokenizer = read_tokenizer(source, settings.revision, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"base.pretrained.model: cannot load {settings.model}: {reason}") from None
    require_cache(model)
    plain, values = stage.params.format == "text", stage.params.chat_template_kwargs
    tokenizer, repairs = complete(tokenizer, stage.params.pad_token, plain, values)
    for repair in repairs:
        stage.log(f"tokenizer repaired: {repair}")
    fit_vocabulary(model, tokenizer)
    return model, tokenizer


def _locate(settings: PretrainedParams, root: Path, noted: dict[str, str]) -> Path | str:
    """A folder below data/raw/ with the files that `ingest` has noted, or a hub id with a pinned commit."""
    key = "base.pretrained.model"
    folder = below_raw(root / "data" / "raw", settings.model, key)
    if folder.is_dir() or noted:
        if hashes_of_files(root / "data" / "raw", settings.model) != noted:
            raise UserError(
                f"{key}: {folder.relative_to(root)} has other files than when `ingest` ran; run `ingest` again, or get "
                "the files by `dvc pull`"
            )
        return folder
    require_hub_id(settings.model, key)
    if not COMMIT.fullmatch(settings.revision or ""):
        raise UserError(
            f"base.pretrained: {settings.model} is no folder below data/raw/, and a hub id needs the full commit hash "
            "as revision (a branch name moves)"
        )
    return settings.model
