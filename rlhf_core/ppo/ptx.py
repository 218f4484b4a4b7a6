"""PPO-ptx: next-token prediction on a text of the user in every minibatch (Ouyang et al. 2022, equation 2)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.control_tokens import text_ids
from rlhf_core.determinism import stream
from rlhf_core.models.batch import pad_batch
from rlhf_core.models.token_logprobs import action_logprobs
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.plan import TEXT
from rlhf_core.training.processes import Processes

Piece = list[int]


@dataclass(frozen=True)
class TextMix:
    """Pieces of text, from which each minibatch draws some."""

    pieces: Sequence[Piece]
    coef: float
    batch_size: int
    micro_batch_size: int
    pad_id: int
    seed: int

    @classmethod
    def of(cls, text: Sequence[Piece], config: PPOConfig, pad_id: int, seed: int) -> "TextMix | None":
        """As the settings say; None where they mix none in. Raises ValueError where there is no text to mix in."""
        settings = config.ptx
        if settings.coef == 0:
            return None
        if not text:
            raise ValueError("ptx.coef is above 0 and there is no text to mix in")
        rows, tokens = config.micro_batch_size, config.micro_batch_tokens
        rows = rows if tokens is None else min(rows, max(1, tokens // settings.tokens))
        return cls(text, settings.coef, settings.batch_size, rows, pad_id, seed)

    def losses(self, models: ActorCritic, step: int, minibatch: int, processes: Processes) -> Iterator[Tensor]:
        """The loss of each micro-batch of this process, in nats per token of the whole minibatch: their sum over all
        processes is the mean over its tokens. To be multiplied by `coef`."""
        draw = stream(self.seed, TEXT, step, minibatch).integers(len(self.pieces), size=self.batch_size)
        chosen = [self.pieces[i] for i in draw]
        tokens = sum(len(piece) - 1 for piece in chosen)
        mine = processes.share_evenly(chosen)
        for start in range(0, len(mine), self.micro_batch_size):
            part = mine[start : start + self.micro_batch_size]
            counted = [piece for piece, counts in part if counts]
            pieces = counted or [part[0][0]]
            prompts, texts = [piece[:1] for piece in pieces], [piece[1:] for piece in pieces]
            batch = pad_batch(prompts, texts, self.pad_id, processes.device)
            read = partial(action_logprobs, actions=batch.response_tokens)
            loss = -models.read_policy(batch, read).sum() / tokens
            yield loss if counted else 0 * loss


def cut_text(text: str, tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[Piece]:
    """The text as pieces of `tokens` tokens each; a last piece of at least two tokens counts too. None of them is a
    control token's. Raises UserError, see `text_ids`."""
    ids = text_ids(tokenizer, text)
    pieces = [ids[start : start + tokens] for start in range(0, len(ids), tokens)]
    return [piece for piece in pieces if len(piece) >= 2]
