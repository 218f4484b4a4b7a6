"""Models as scorers: the run's reward model, which reads token ids, and models from elsewhere, which read text."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.chat import Conversation, as_text
from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.data.tokenizer import (
    Reads,
    complete_answer,
    encode_answered,
    encode_prompt,
    encode_response,
)
from rlhf_core.errors import UserError
from rlhf_core.models.batch import TokenBatch, map_batches, sequence_scores
from rlhf_core.models.batching import micro_batches, tokens_per_pass
from rlhf_core.models.hf import context_length

REWARD_MODEL_NAME = "reward model"
UNLIMITED = 10**9
"""A tokenizer's length from here on stands for none."""

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class RewardModelScorer:
    """The run's reward model. It reads each answer with its end, also one that was cut off: its scalar means something
    where it was trained. One that shares the policy's tokenizer reads the sampled ids without decoding them; one on
    another base reads the texts with its own tokenizer."""

    model: PreTrainedModel
    pad_id: int
    eos_id: int
    """Both of the tokens that it reads."""
    batch_size: int
    name: str = REWARD_MODEL_NAME
    own: PreTrainedTokenizerBase | None = None
    """Its tokenizer, where that is not the policy's."""

    @torch.no_grad()
    def __call__(self, answers: Answers) -> Scored:
        """The scalar at each answer's end. Raises UserError for an answer that is longer than its context."""
        prompts, responses = answers.prompt_ids, [list(ids) for ids in answers.response_ids]
        if self.own is not None:
            prompts = [encode_prompt(self.own, prompt) for prompt in answers.prompts]
            responses = [encode_response(self.own, text, ended=False) for text in answers.texts]
        context = context_length(self.model)
        responses = [complete_answer(r, self.eos_id, context - len(p)) for p, r in zip(prompts, responses, strict=True)]
        for prompt, response in zip(prompts, responses, strict=True):
            require_fit(self.name, len(prompt) + len(response), context)

        def score(batch: TokenBatch) -> list[float]:
            return sequence_scores(self.model, batch).tolist()

        scores = map_batches(
            score, prompts, responses, pad_id=self.pad_id, batch_size=self.batch_size, device=self.model.device
        )
        return Scored(scores)

    def require_room(self, prompts: Sequence[Conversation], max_new_tokens: int) -> None:
        """Raise UserError unless its context holds each prompt and `max_new_tokens` of its own tokens."""
        for prompt in prompts if self.own is not None else ():
            require_fit(self.name, len(encode_prompt(self.own, prompt)) + max_new_tokens, context_length(self.model))


@dataclass(frozen=True)
class TextScorer:
    """A sequence classifier that was trained elsewhere, such as a reward model or a classifier of sentiment. It reads
    texts with its own tokenizer, and scores as transformers does for a single row of them."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    """In tables and pictures: the folder's."""
    reads: Reads
    output: int | None
    """Which output is the score, as its log-odds; None for a model with one output, which is the score itself."""
    batch_size: int

    @property
    def context(self) -> int:
        """Longest sequence in tokens."""
        body, known = self.model.base_model, [context_length(self.model)]
        if self.tokenizer.model_max_length < UNLIMITED:
            known.append(self.tokenizer.model_max_length)
        positions: Any = getattr(getattr(body, "embeddings", None), "position_embeddings", None)
        if getattr(positions, "padding_idx", None) is not None:  # RoBERTa counts positions from behind that of padding
            known.append(positions.num_embeddings - positions.padding_idx - 1)
        return min(known)

    @torch.no_grad()
    def __call__(self, answers: Answers) -> Scored:
        """One number for each answer. Raises UserError for a score that is NaN or infinite, and as `encode`."""
        rows = [self.encode(*one) for one in zip(answers.prompts, answers.texts, strict=True)]
        lengths = [len(row["input_ids"]) for row in rows]
        device, found = self.model.device, dict[int, float]()
        # without a pad token in its config, transformers finds the end of a single row only
        size = 1 if self.model.config.pad_token_id is None else self.batch_size
        for places in micro_batches(range(len(rows)), [(0, n) for n in lengths], size, tokens_per_pass(device)):
            batch = self._padded([rows[i] for i in places], max(lengths[i] for i in places))
            with torch.autocast(device.type, enabled=False):  # its precision is its own
                logits = self.model(**batch).logits
            found |= zip(places, self._scores(logits.float()).tolist(), strict=True)
        if bad := [score for score in found.values() if not math.isfinite(score)]:
            raise UserError(
                f"{self.name}: scores {len(bad)} of {len(rows)} answers with {bad[0]}; set precision: float32, or use "
                "another model"
            )
        return Scored([found[i] for i in range(len(rows))])

    def encode(self, prompt: Conversation, answer: str) -> dict[str, list[int]]:
        """What the model reads of an answer: token ids and, where it has them, types of tokens. Control tokens that
        texts spell are text. Raises UserError where that is longer than the context, since nothing is cut off, and
        where the chat template cannot write the conversation."""
        if self.reads == "conversation":
            row = {"input_ids": encode_answered(self.tokenizer, prompt, answer)}
        else:
            texts = {"text": [as_text(prompt) + answer], "answer": [answer], "pair": [as_text(prompt), answer]}
            found = self.tokenizer(*texts[self.reads], split_special_tokens=True)
            row = {name: list(found[name]) for name in ("input_ids", "token_type_ids") if name in found}
            if not row["input_ids"]:  # an empty answer, and a tokenizer that writes nothing around a text
                bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
                row = {name: [eos if bos is None else bos] if name == "input_ids" else [0] for name in row}
        require_fit(self.name, len(row["input_ids"]), self.context)
        return row

    def require_room(self, prompts: Sequence[Conversation], max_new_tokens: int) -> None:
        """Raise UserError unless the context holds each prompt and `max_new_tokens` of the model's own tokens."""
        for prompt in prompts:
            require_fit(self.name, len(self.encode(prompt, "")["input_ids"]) + max_new_tokens, self.context)

    def _padded(self, rows: Sequence[Mapping[str, list[int]]], width: int) -> dict[str, Tensor]:
        """The rows, padded on the right: positions then need no correction in any architecture."""
        fill = {"input_ids": self.model.config.pad_token_id or 0, "token_type_ids": 0}
        parts = {name: [[*row[name], *[fill[name]] * (width - len(row[name]))] for row in rows] for name in rows[0]}
        parts["attention_mask"] = [[int(i < len(row["input_ids"])) for i in range(width)] for row in rows]
        return {name: torch.tensor(part, device=self.model.device) for name, part in parts.items()}

    def _scores(self, logits: Float[Tensor, "rows outputs"]) -> Float[Tensor, "rows"]:
        """log p − log(1 − p) of the label, in nats; independent labels (`problem_type`) have it as their logit."""
        if self.output is None:
            return logits[:, 0]
        chosen = logits[:, self.output]
        if self.model.config.problem_type in {"multi_label_classification", "regression"}:
            return chosen
        others = [i for i in range(logits.shape[1]) if i != self.output]
        return chosen - logits[:, others].logsumexp(dim=1)


def require_fit(name: str, tokens: int, context: int) -> None:
    """Raise UserError for a prompt with its answer that is longer than the context of a model that scores it."""
    if tokens > context:
        raise UserError(
            f"{name}: a prompt with its answer has {tokens} of its tokens, and its context holds {context}; lower "
            "max_new_tokens, leave long prompts out, or use a model with a longer context"
        )


def require_room(scorer: object, prompts: Sequence[Conversation], max_new_tokens: int) -> None:
    """Raise UserError unless each model in the scorer that has a tokenizer of its own has room for each prompt and
    `max_new_tokens` of its tokens."""
    models: list[RewardModelScorer | TextScorer] = [*parts_of(scorer, RewardModelScorer), *parts_of(scorer, TextScorer)]
    for one in models:
        one.require_room(prompts, max_new_tokens)


def models_of(scorer: object) -> list[PreTrainedModel]:
    """The models in a scorer, at any depth of dataclasses, sequences and mappings."""
    return list(parts_of(scorer, PreTrainedModel))


def parts_of(scorer: object, kind: type[Kind]) -> Iterator[Kind]:
    """The parts of a scorer that are of this kind, at any depth of dataclasses, sequences and mappings."""
    parts: list[object] = []
    if isinstance(scorer, kind):
        yield scorer
    elif is_dataclass(scorer):
        parts = [getattr(scorer, part.name) for part in fields(scorer)]
    elif isinstance(scorer, Mapping):
        parts = list(scorer.values())
    elif isinstance(scorer, list | tuple):
        parts = list(scorer)
    for part in parts:
        yield from parts_of(part, kind)
