"""NaN and infinity: the stage stops with one line that names the step, makes no step with them, never writes them down,
and leaves the last good checkpoint and the outs of an earlier run as they are."""

import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rlhf_core.config.base import PretrainConfig
from rlhf_core.config.reward import RewardConfig
from rlhf_core.config.sft import SFTConfig
from rlhf_core.data.scorer import Answers
from rlhf_core.errors import NonFiniteError
from rlhf_core.finite import require_finite
from rlhf_core.models.hf import save_checkpoint
from rlhf_core.ppo import trainer as trainer_module
from rlhf_core.ppo.trainer import PPOTrainer
from rlhf_core.pretrain import pretrain
from rlhf_core.reward import Comparison, train_reward_model
from rlhf_core.sft import Demonstration, fine_tune
from rlhf_core.training.loop import Training
from rlhf_core.training.run import Run

if TYPE_CHECKING:
    from tests.conftest import Ended, Project

TINY: Any = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "rlhf_core" / "conftest.py")))
STEP = 3
"""The step that meets NaN, counted from 1."""

ROWS = [Demonstration([3, 5 + i % 4, 4], [*range(10, 11 + i % 7), 1]) for i in range(16)]
PAIRS = [Comparison([3, 5 + i % 5, 4], [[30, 10 + i, 1], [11 + i, 12]], [(0, 1)]) for i in range(16)]
OPTIMISER = {"learning_rate": 1e-3, "warmup_steps": 0, "weight_decay": 0.0, "max_tokens": 64, "batch_size": 4}
SFT = SFTConfig(**OPTIMISER, epochs=1, micro_batch_size=2, evaluate_every=4, patience=0)
REWARD = RewardConfig(**OPTIMISER, epochs=1)
PRETRAIN = PretrainConfig(steps=4, batch_size=4, learning_rate=1e-3)

STAGES: dict[str, tuple[Callable[[Any, Run], Any], Callable[..., Any]]] = {
    "base": (
        lambda model, run: pretrain(model, [range(5, 55)] * 20, PRETRAIN, 50, run),
        TINY.tiny_lm,
    ),
    "sft": (lambda model, run: fine_tune(model, ROWS, ROWS[:2], SFT, 0, run), TINY.tiny_lm),
    "reward": (lambda model, run: train_reward_model(model, PAIRS, REWARD, 0, run), TINY.tiny_scalar),
}


def checkpoints(folder: Path) -> list[int]:
    """The steps of the checkpoints below a folder, every tensor of which is finite."""
    files = [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".pt")]
    for path in files:
        content = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        require_finite(content, path.name)
    return sorted({int(found[1]) for path in files if (found := re.search(r"checkpoint-(\d+)", str(path)))})


class Spoiler:
    """NaN or infinity in a training at step 3: in the loss, in a gradient, or in a weight after a finite update."""

    def __init__(self, kind: str, model: nn.Module) -> None:
        self.kind, self.model, self.steps = kind, model, 0
        self.before: list[torch.Tensor] = []
        head = list(model.parameters())[-1]
        head.register_hook(lambda gradient: gradient * math.inf if kind == "gradient" and self.due else gradient)
        body = getattr(model, model.base_model_prefix)
        body.register_forward_hook(self._forward)

    @property
    def due(self) -> bool:
        """Whether the step under way is the one."""
        return self.steps == STEP - 1

    def _forward(self, _: Any, __: Any, output: Any) -> None:
        if torch.is_grad_enabled() and self.due:
            self.before = [p.detach().clone() for p in self.model.parameters()]
            if self.kind == "loss":
                output.last_hidden_state = output.last_hidden_state * math.nan

    def report(self, step: int, total: int, values: dict[str, float]) -> None:
        """Called when a step is done and before its checkpoint is written."""
        if "loss" in values:
            if self.kind == "weight" and self.due:
                next(self.model.parameters()).data.view(-1)[0] = math.inf
            self.steps = step


@pytest.mark.parametrize("stage", list(STAGES))
@pytest.mark.parametrize(
    ("kind", "words"),
    [("loss", "the loss is nan"), ("gradient", "the gradient norm is "), ("weight", "is not finite and was not w")],
)
def test_a_training_stops_at_the_step_and_keeps_the_last_good_checkpoint(
    kind: str, words: str, stage: str, tmp_path: Path
) -> None:
    """No optimiser step is made with a NaN; a weight that became infinite by a finite gradient is not written."""
    train, build = STAGES[stage]
    model = build()
    spoiler = Spoiler(kind, model)
    with pytest.raises(NonFiniteError, match=f"^step {STEP}: .*{words}.*; lower the learning rate$"):
        train(model, Run(tmp_path, seed=3, report=spoiler.report, checkpoint_every=1))
    assert checkpoints(tmp_path) == [1, 2]
    if kind != "weight":
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), spoiler.before, strict=True))


def test_a_validation_loss_that_is_not_finite_is_not_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY.tiny_lm()

    def report(step: int, total: int, values: dict[str, float]) -> None:
        if step == 2 and "loss" in values:
            next(model.parameters()).data.fill_(math.nan)

    config = SFT.model_copy(update={"evaluate_every": 2})
    with pytest.raises(NonFiniteError, match="step 2: the validation loss is nan"):
        fine_tune(model, ROWS, ROWS[:2], config, 0, Run(tmp_path, seed=3, report=report))
    assert not list(tmp_path.rglob("best*"))


def scorer_with_nan(trainer: list[PPOTrainer]) -> Callable[[Answers], list[float]]:
    def score(answers: Answers) -> list[float]:
        scores: list[float] = TINY.token_share(answers)
        return [math.nan, *scores[1:]] if trainer and trainer[0].steps_done == STEP - 1 else scores

    return score


PPO_WORDS = {
    "loss": "the loss is nan; lower the learning rate",
    "infinite loss": "the loss is inf; lower the learning rate",
    "critic's gradient": "the gradient norm of the critic is inf; lower the learning rate",
    "policy's gradient": "the gradient norm of the policy is nan; lower the learning rate",
    "score": "the reward model scores 1 of 8 answers with nan; train it again with a lower reward.learning_rate",
    "KL": "the loss is nan; lower the learning rate",
    "text": "the loss is nan; lower the learning rate",
    "weights": "the policy's log-probabilities are not finite; lower the learning rate",
}


def damage(kind: str, trainer: PPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put NaN or infinity into the trainer's present step."""
    models, losses_of = trainer.models, trainer_module.losses_of
    if kind in ("loss", "infinite loss"):
        factor = math.nan if kind == "loss" else math.inf
        monkeypatch.setattr(
            trainer_module, "losses_of", lambda *a: {k: v.abs() * factor + v.abs() for k, v in losses_of(*a).items()}
        )
    elif kind == "critic's gradient":
        models.critic.score.weight.register_hook(lambda gradient: gradient.abs() * math.inf + 1)
    elif kind == "policy's gradient":
        next(models.policy.parameters()).register_hook(lambda gradient: gradient * math.nan)
    elif kind == "KL":
        next(models.reference.parameters()).data.fill_(math.nan)
    elif kind == "text":
        losses = trainer.text.losses
        monkeypatch.setattr(type(trainer.text), "losses", lambda _, *a: (v * math.nan for v in losses(*a)))
    elif kind == "weights":
        next(models.policy.parameters()).data.fill_(math.nan)


@pytest.mark.parametrize("kind", list(PPO_WORDS))
def test_ppo_stops_at_the_step_and_makes_none_with_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PPOTrainer] = []
    text = {"text": [[3, 9, 4, 20, 21], [30, 31, 32]], "ptx": {"coef": 1.0, "batch_size": 3}} if kind == "text" else {}
    scorer = scorer_with_nan(made) if kind == "score" else TINY.token_share
    trainer: PPOTrainer = TINY.tiny_trainer(scorer=scorer, **text)
    made.append(trainer)
    for _ in range(STEP - 1):
        trainer.step()
    good = trainer.state_dict()
    require_finite(good)
    damage(kind, trainer, monkeypatch)
    models = (trainer.models.policy, trainer.models.critic)
    before = [p.detach().clone() for model in models for p in model.parameters()]
    with pytest.raises(NonFiniteError, match=f"^step {STEP}: {re.escape(PPO_WORDS[kind])}"):
        trainer.step()
    after = [p.detach() for model in models for p in model.parameters()]
    assert all(torch.allclose(one, two, rtol=0, atol=0, equal_nan=True) for one, two in zip(after, before, strict=True))
    assert trainer.steps_done == STEP - 1


@pytest.mark.parametrize("where", ["a weight", "the optimiser"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_ppo_has_no_state_to_save_once_it_is_not_finite(where: str, value: float) -> None:
    trainer: PPOTrainer = TINY.tiny_trainer()
    trainer.step()
    parameter = next(trainer.models.critic.parameters())
    target = parameter.data if where == "a weight" else trainer.optimizers["critic"].state[parameter]["exp_avg_sq"]
    target.view(-1)[3] = value
    place = r"state\.models\.critic\." if where == "a weight" else r"state\.optimizer_critic\.state\.0\.exp_avg_sq"
    with pytest.raises(NonFiniteError, match=f"^step 1: {place}.* is not finite and was not written"):
        trainer.state_dict()


def test_no_model_folder_holds_nan(tmp_path: Path) -> None:
    model = TINY.tiny_lm()
    save_checkpoint(tmp_path / "good", model, TINY.tiny_tokenizer())
    next(model.parameters()).data.view(-1)[0] = math.nan
    with pytest.raises(NonFiniteError, match=r"weights\..* is not finite"):
        save_checkpoint(tmp_path / "bad", model, TINY.tiny_tokenizer())
    assert not (tmp_path / "bad").exists()


def damage_stage(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of step 3 is NaN; in PPO that of its second minibatch, of four."""
    if stage == "ppo":
        losses_of, calls = trainer_module.losses_of, []

        def losses(*arguments: Any) -> dict[str, torch.Tensor]:
            calls.append(1)
            factor = math.nan if len(calls) == 4 * (STEP - 1) + 2 else 1.0
            return {name: loss * factor for name, loss in losses_of(*arguments).items()}

        monkeypatch.setattr(trainer_module, "losses_of", losses)
        return
    step = Training.step

    def spoilt(training: Training) -> None:
        sums, factor = training.sums, math.nan if training.done == STEP - 1 else 1.0
        training.sums = lambda places: {name: value * factor for name, value in sums(places).items()}
        step(training)
        training.sums = sums

    monkeypatch.setattr(Training, "step", spoilt)


@pytest.mark.slow
@pytest.mark.chosen("reward-reward.learning_rate", "ppo-ppo.learning_rate")
@pytest.mark.parametrize(
    ("stage", "rate"),
    [
        ("base", "base.pretrain.learning_rate"),
        ("sft", "sft.learning_rate"),
        ("reward", "reward.learning_rate"),
        ("ppo", "ppo.learning_rate"),
    ],
)
def test_a_stage_stops_with_one_line_and_a_lower_learning_rate_starts_again(
    stage: str,
    rate: str,
    finished: "Project",
    stage_main: "Callable[[Project, str], Ended]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit 2, the outs of the earlier run and the checkpoint of step 2 untouched; the corrected run has its own key
    and leaves the old state alone."""
    finished.set("runtime.tracking", False)
    finished.set("runtime.checkpoint_every", 1)
    finished.set("reward.epochs", 3)
    outs = finished.outputs()
    with monkeypatch.context() as patched:
        damage_stage(stage, patched)
        ended = stage_main(finished, stage)
    assert ended.code == 2
    assert re.search(rf"^{stage}: step {STEP}: the loss is nan; lower the learning rate", ended.stderr, re.MULTILINE)
    assert "Traceback" not in ended.stderr
    assert finished.outputs() == outs
    (folder,) = [path for path in (finished.root / "work" / stage).iterdir() if path.is_dir()]
    assert checkpoints(folder) == [1, 2]
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    *blocks, key = rate.split(".")
    block = finished.params()
    for name in blocks:
        block = block[name]
    finished.set(rate, float(block[key]) / 10)
    assert stage_main(finished, stage).code == 0
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == kept
    assert finished.json(f"metrics/{stage}.json") != {}
    changed = {name for name, content in finished.outputs().items() if content != outs[name]}
    model = "snapshots/step-000004" if stage == "ppo" else f"{stage}/model"
    assert f"models/{model}.safetensors" in changed
