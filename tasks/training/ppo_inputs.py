"""Inputs of PPO's loop beside the prompts: the models that it begins with, and the text of PPO-ptx."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import UserError
from rlhf_core.models.ensemble import Ensemble
from rlhf_core.models.hf import map_scalar
from rlhf_core.models.lora import Adapter
from rlhf_core.ppo.ptx import Piece, cut_text
from rlhf_core.ppo.scoring import ScoreNormalisation
from tasks.datasets.raw import TEXTS
from tasks.params.round import RoundParams
from tasks.stage import rounds
from tasks.training.scalar_models import ScalarModels
from tasks.training.scorer import REWARD

SFT = rounds.SFT


@dataclass(frozen=True)
class Beginning:
    """What a run of the loop starts from; folders relative to the project."""

    start: str
    """The model that the policy begins with."""
    reference: str
    """The model of the KL penalty."""
    seed: int


def beginning(root: Path, seed: int, params: RoundParams) -> Beginning:
    """Of the present round: models/sft, or from round 2 on the policy of the round before; the reference as
    `round.reference` says."""
    last, start = rounds.last_closed(root), rounds.start_of(root)
    return Beginning(start, start if params.reference == "previous" else SFT, rounds.seed_of(seed, last + 1))


def starting_critic(
    root: Path, config: PPOConfig, normalisation: ScoreNormalisation, seed: int, models: ScalarModels
) -> PreTrainedModel | Adapter | None:
    """A critic of its own as the settings say; None where the loop needs no such model. A critic that starts as the
    reward model predicts scores in PPO's unit (rule 20); of several members it is the first, shifted to the mean of
    their combined score."""
    if not config.needs_critic_model:
        return None
    if config.critic.init == "sft":
        return models.critic_from_sft(root / SFT, config.lora, seed)
    critic = models.critic_from_reward(root / REWARD, config.lora)
    model = critic.model if isinstance(critic, Adapter) else critic
    if (ensemble := Ensemble.read(root / REWARD)) is not None:
        map_scalar(model, 1.0, ensemble.shift_of_first)
    map_scalar(model, *normalisation.unit(config.score))
    return critic


def read_text(root: Path, config: PPOConfig, tokenizer: PreTrainedTokenizerBase, context: int) -> list[Piece]:
    """The user's text of PPO-ptx, in pieces; nothing where it is off. Raises UserError for a file that is missing or
    holds no piece, and for pieces longer than the model's context."""
    settings = config.ptx
    if settings.coef == 0:
        return []
    if settings.tokens > context:
        raise UserError(f"ppo.ptx.tokens is {settings.tokens}, longer than the model's context of {context}")
    path = root / TEXTS / settings.file
    if not path.is_file():
        raise UserError(f"ppo.ptx.file: {TEXTS}/{settings.file} not found; `ingest` copies it from data/raw/")
    text = path.read_text(encoding="utf-8")
    pieces = cut_text(text, tokenizer, settings.tokens)
    if not pieces:
        raise UserError(f"ppo.ptx.file: data/raw/{settings.file} holds less than two tokens")
    return pieces
