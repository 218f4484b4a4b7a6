"""Stage `reward`: the Bradley-Terry reward model that PPO maximises, its further members, the one that only judges, and
their figures on held-out prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.config.reward import RewardConfig
from rlhf_core.data.tokenizer import complete, continues_text, load_tokenizer, read_tokenizer, same_tokens
from rlhf_core.determinism import permutation, stream
from rlhf_core.errors import UserError
from rlhf_core.loading import load_config, loading
from rlhf_core.models.ensemble import JUDGE, Ensemble, member_folder
from rlhf_core.models.hf import (
    context_of,
    fit_vocabulary,
    place,
    require_scalar_head,
    save_checkpoint,
    scalar_model_from,
)
from rlhf_core.models.precision import autocast
from rlhf_core.reward import Comparison, PairScores, score_pairs, train_reward_model
from tasks.datasets.raw import REWARD_BASE, as_noted
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts
from tasks.stage.workers import is_worker
from tasks.summary import BASELINES, not_better_than
from tasks.training.gold_judge import judge_of
from tasks.training.pairs import PREFERENCES, Reading, comparisons
from tasks.training.ratings import RATINGS, rated_comparisons
from tasks.training.reward_figures import baseline_figures, figures_of, gold_margins
from tasks.training.trainer_setup import log_table, place_of, training_run

REWARD, SFT = "models/reward", "models/sft"
OF_JUDGE = 0
"""The number of the judging reward model, beside those of the members, which start at 1."""
OF_PAIRS = 2**20
"""The number of the draw of `reward.max_pairs`, beyond all members'."""


NO_SCORES = PairScores(torch.zeros(0), torch.zeros(0))


@dataclass(frozen=True)
class Fitted:
    """What is left in memory of a trained reward model."""

    log: list[dict[str, float]]
    heldout: PairScores
    seen: PairScores
    """Pairs of as many training prompts as are held out."""


def execute(stage: Stage[RewardConfig]) -> None:
    """Make models/reward, metrics/reward.json and the tables of plots."""
    bases, tokenizer, reading = bases_of(stage)
    limit = stage.params.max_tokens
    for base in bases:
        with loading(base):
            limit = min(limit, context_of(load_config(base, trust_remote_code=trusts(stage))))
    rated = bool(stage.read(RATINGS))
    read = rated_comparisons if rated else partial(comparisons, reading=reading)
    training, too_long = read(stage, tokenizer, "train", limit)
    heldout, also_too_long = read(stage, tokenizer, "validation", limit)
    own, judging = split_prompts(training, stage.params.judge_share, stage.seed)
    if stage.params.max_pairs is not None:
        own = draw_pairs(own, stage.params.max_pairs, stage.seed)

    members = [fit(stage, base, tokenizer, number, own, heldout) for number, base in enumerate(bases, start=1)]
    judge = fit(stage, bases[0], tokenizer, OF_JUDGE, judging, heldout) if judging else None
    if is_worker():
        return

    stage.outputs.write_csv("plots/reward.csv", log_table(members[0].log, {"loss": "loss", "accuracy": "accuracy"}))
    scores, seen, of_members = combine(stage, members)
    annotator = judge_of(stage)
    labelled = [row for row in stage.read(PREFERENCES) if row["split"] == "validation"] if annotator else []
    gold = gold_margins(labelled, tokenizer, heldout, annotator, reading, limit) if annotator else None
    metrics, tables = figures_of(scores, [len(c.pairs) for c in heldout], gold, stage.seed)
    metrics |= baseline_figures(tokenizer, own, heldout, scores, stage.seed)
    metrics.update(train_accuracy=seen.right.mean().item(), train_loss=seen.loss, **of_members)
    for out, rows in tables.items():
        stage.outputs.write_csv(out, rows)
    if judge is not None:
        of_judge, _ = figures_of(judge.heldout, [len(c.pairs) for c in heldout], None, stage.seed)
        names = ("accuracy", "accuracy_low", "accuracy_high", "loss")
        metrics.update({f"judge_{name}": of_judge[f"heldout_{name}"] for name in names})
        metrics.update(judge_prompts=len(judging), train_prompts=len(own))
    if stage.params.max_pairs is not None:
        metrics["train_pairs"] = sum(len(c.pairs) for c in own)
    if rated:
        answers = {"train_ratings": training, "heldout_ratings": heldout}
        metrics.update({name: sum(len(c.responses) for c in found) for name, found in answers.items()})
    stage.write_metrics({**metrics, "pairs_too_long": too_long + also_too_long})
    log_verdict(stage, metrics)


def log_verdict(stage: Stage[RewardConfig], metrics: Mapping[str, Any]) -> None:
    """Print the accuracy on held-out pairs beside the baselines', and a warning where it is not above them."""

    def shown(key: str) -> str:
        return f"{metrics[key]:.1%} ({metrics[f'{key}_low']:.1%} to {metrics[f'{key}_high']:.1%})"

    others = "; ".join(f"{label} {shown(f'{name}_accuracy')}" for name, label in BASELINES.items())
    stage.log(f"of {metrics['heldout_pairs']} held-out pairs {shown('heldout_accuracy')} ranked correctly; {others}")
    if "reward_rating_spearman" in metrics:
        names = {"reward": "the reward model", **BASELINES}
        known = [f"{label} {value:.2f}" for n, label in names.items()
                 if (value := metrics[f"{n}_rating_spearman"]) is not None]  # fmt: skip
        stage.log(f"rank correlation with held-out ratings: {', '.join(known)}")
    if (other := not_better_than(metrics)) is not None:
        learned = metrics["train_accuracy"] > metrics["heldout_accuracy_high"]
        stage.warn(
            f"the reward model is not shown to be better than {other}: what PPO makes of its score means little; "
            f"of its training pairs it ranks {metrics['train_accuracy']:.1%} correctly: "
            + ("add pairs" if learned else "it has learned too little, raise reward.learning_rate or reward.epochs")
        )


def bases_of(stage: Stage[RewardConfig]) -> tuple[list[Path], PreTrainedTokenizerBase, Reading]:
    """The folder of the model that each member is trained on, their tokenizer, and how they read sampled answers: as
    text, where that tokenizer is another one than the policy's. Raises UserError for a `reward.base` that is not what
    `ingest` has noted, or has no scalar model, and for several with different tokenizers."""
    tokenizer, names = load_tokenizer(stage.root / SFT, trust_remote_code=trusts(stage)), stage.params.bases
    if not names:
        return [stage.root / SFT] * stage.params.members, tokenizer, "complete"
    pad, raw, noted = str(tokenizer.pad_token), stage.root / "data" / "raw", stage.read_json(REWARD_BASE)
    found: dict[str, tuple[Path, PreTrainedTokenizerBase]] = {}
    for name in dict.fromkeys(names):
        files = noted.get(name, {}) if isinstance(stage.params.base, list) else noted
        folder = as_noted(raw, name, files, "reward.base")
        with loading(folder):
            require_scalar_head(load_config(folder, trust_remote_code=trusts(stage)))
        own = read_tokenizer(folder, trust_remote_code=trusts(stage))
        completed, repairs = complete(own, pad if pad != own.eos_token else "<|pad|>", continues_text(tokenizer))
        for repair in repairs:
            stage.log(f"tokenizer of reward.base repaired: {repair}")
        found[name] = folder, completed
        if not same_tokens(completed, found[names[0]][1]):
            raise UserError(
                f"reward.base: data/raw/{name} has another tokenizer than data/raw/{names[0]} (vocabulary, chat "
                "template or eos token): the members read the same tokens; list models with the same tokenizer"
            )
    completed = found[names[0]][1]
    reading: Reading = "complete" if same_tokens(completed, tokenizer) else "text"
    return [found[name][0] for name in names], completed, reading


def draw_pairs(training: Sequence[Comparison], count: int, seed: int) -> list[Comparison]:
    """The comparisons with `count` of their pairs, and only the responses of these; drawn by seed, so that the pairs of
    a smaller count are among those of a larger one. Raises UserError where there are fewer pairs."""
    places = [(index, pair) for index, comparison in enumerate(training) for pair in comparison.pairs]
    if count > len(places):
        raise UserError(
            f"reward.max_pairs is {count}, and the reward model has {len(places)} training pairs; lower it, or set it "
            "to null for all"
        )
    drawn: dict[int, list[tuple[int, int]]] = {}
    for number in sorted(permutation(len(places), seed, OF_PAIRS)[:count]):
        index, pair = places[number]
        drawn.setdefault(index, []).append(pair)
    found = []
    for index, pairs in drawn.items():
        kept = sorted({place for pair in pairs for place in pair})
        responses = [training[index].responses[place] for place in kept]
        renumbered = [(kept.index(better), kept.index(worse)) for better, worse in pairs]
        found.append(replace(training[index], responses=responses, pairs=renumbered))
    return found


def split_prompts(training: list[Comparison], share: float, seed: int) -> tuple[list[Comparison], list[Comparison]]:
    """The comparisons of PPO's reward model and those of the judging one, in the order of the data; whole prompts,
    drawn by seed from the new ones of each round: no prompt changes its model from round to round, or the judging one
    would learn what earlier policies were trained on. Raises UserError where a second reward model is wanted and there
    are too few prompts."""
    if share == 0:
        return training, []
    drawn = set[int]()
    for number in {comparison.round for comparison in training}:
        new = [index for index, comparison in enumerate(training) if comparison.round == number]
        count = min(max(1, round(share * len(new))), len(new) - 1)
        drawn |= {new[i] for i in permutation(len(new), seed, OF_JUDGE)[:count]}
    if not drawn:
        raise UserError(
            f"{PREFERENCES}: reward.judge_share shares the training prompts between two reward models, and there is "
            "only one; add pairs, or set reward.judge_share: 0"
        )
    parts: tuple[list[Comparison], list[Comparison]] = ([], [])
    for index, comparison in enumerate(training):
        parts[index in drawn].append(comparison)
    return parts


def fit(
    stage: Stage[RewardConfig],
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    number: int,
    training: Sequence[Comparison],
    heldout: Sequence[Comparison],
) -> Fitted:
    """Train a member (or the judging model) in a state of its own and, in the main process, save it and score held-out
    and training pairs. One that an earlier process has trained is read from its last checkpoint."""
    part = "judge" if number == OF_JUDGE else "" if number == 1 else f"member_{number}"
    if part:
        stage.log(part.replace("_", " "))
    run_ = training_run(stage, ["loss", "accuracy"], part, member_seed(stage.seed, number))
    where = place_of(run_, stage.params.lora)
    model = scalar_model_from(base, run_.seed, trust_remote_code=trusts(stage), log=stage.log, **where)
    is_own = base == stage.root / SFT
    if not is_own:
        fit_vocabulary(model, tokenizer)
    pad_id = int(tokenizer.pad_token_id)
    folder = stage.out(REWARD) / JUDGE if number == OF_JUDGE else member_folder(stage.out(REWARD), number)
    # Adapters that the policy's body can carry are kept beside the model.
    log = train_reward_model(model, training, stage.params, pad_id, run_, folder if is_own else None)
    if not run_.is_main:
        return Fitted(log, NO_SCORES, NO_SCORES)
    save_checkpoint(folder, model.cpu(), tokenizer)
    some = (heldout, training[: len(heldout)])
    with autocast(stage.precision, place(model).device):
        return Fitted(log, *(score_pairs(model, pairs, pad_id, stage.params.batch_size) for pairs in some))


def member_seed(seed: int, number: int) -> int:
    """Of head and data order. The first member has the run's, the others a random one: seeds of a study, 1, 2, 3, must
    not share members."""
    return seed if number == 1 else int(stream(seed, number).integers(2**32))


def combine(stage: Stage[RewardConfig], members: Sequence[Fitted]) -> tuple[PairScores, PairScores, dict[str, float]]:
    """The scores of PPO's reward model on held-out and training pairs, and figures of its members; of a single member
    its own scores and none. Several members get ensemble.json beside them."""
    if len(members) == 1:
        return members[0].heldout, members[0].seen, {}
    heldout, seen = (
        torch.stack([torch.cat([scores.chosen, scores.rejected]) for scores in side])
        for side in ([member.heldout for member in members], [member.seen for member in members])
    )
    ensemble = Ensemble.fitted(stage.params.combine, stage.params.std_coef, heldout)
    ensemble.write(stage.out(REWARD))
    scores, std = ensemble(heldout)
    figures = {"disagreement": std.mean().item()}
    for number, member in enumerate(members, start=1):
        figures[f"member_{number}_accuracy"] = member.heldout.right.double().mean().item()
        figures[f"member_{number}_loss"] = member.heldout.loss
    return PairScores(*scores.chunk(2)), PairScores(*ensemble(seen)[0].chunk(2)), figures
