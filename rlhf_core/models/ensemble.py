"""Several reward models as one scorer: how members' scores are combined, and where the members are. Coste et al. 2023,
"Reward Model Ensembles Help Mitigate Overoptimization"; Eisenstein et al. 2023, "Helping or Herding?"."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_core.data.scorer import Answers, Scored, Scorer
from rlhf_core.models.scorers import REWARD_MODEL_NAME

FILE = "ensemble.json"
JUDGE = "judge"
"""Folder, in that of the reward model, of the one that judges and that PPO is not trained on; its part of a score."""


@dataclass(frozen=True)
class Ensemble:
    """The rule that makes one score of the members' scores.

    Bradley-Terry fixes differences of scores, in nats, and no zero: each member's mean on the same answers is
    subtracted first, or `min` would follow the member with the lowest offset. Scores are not divided by their
    deviation: differences are log-odds in every member, and calibration and loss of the combination need that unit.
    """

    combine: str
    """`mean`, `min` (worst-case optimisation) or `mean_minus_std` (uncertainty-weighted optimisation, with the standard
    deviation where Coste et al. have the variance)."""
    std_coef: float
    """Weight of the standard deviation in `mean_minus_std`."""
    means: Sequence[float]
    """Each member's mean score on the same answers, in nats."""
    mean: float = 0.0
    """The mean of the combined score on these answers."""

    @classmethod
    def fitted(cls, combine: str, std_coef: float, scores: Float[Tensor, "members answers"]) -> "Ensemble":
        """The rule with the means of these scores."""
        means = scores.double().mean(dim=1).tolist()
        total, _ = cls(combine, std_coef, means)(scores)
        return cls(combine, std_coef, means, total.mean().item())

    def __call__(
        self, scores: Float[Tensor, "members answers"]
    ) -> tuple[Float[Tensor, "answers"], Float[Tensor, "answers"]]:
        """The combined score of each answer, and the standard deviation of the members' scores (population)."""
        centred = scores.double() - torch.tensor(self.means, dtype=torch.float64)[:, None]
        mean, std = centred.mean(dim=0), centred.std(dim=0, correction=0)
        totals = {"mean": mean, "min": centred.amin(dim=0), "mean_minus_std": mean - self.std_coef * std}
        return totals[self.combine], std

    @property
    def shift_of_first(self) -> float:
        """What makes the first member's mean score on these answers that of the combined score."""
        return self.mean - self.means[0]

    def write(self, folder: Path) -> None:
        """Write ensemble.json to the folder of the first member."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Ensemble | None":
        """The rule in the folder of a reward model; None for a single model."""
        path = folder / FILE
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def member_folder(folder: Path, number: int) -> Path:
    """The folder of a member, counted from 1: the reward model's own, or one in it."""
    return folder if number == 1 else folder / "members" / str(number)


def member_folders(folder: Path) -> list[Path]:
    """The folders of all members of the reward model in `folder`; of a single model its own."""
    ensemble = Ensemble.read(folder)
    return [member_folder(folder, number + 1) for number in range(1 if ensemble is None else len(ensemble.means))]


@dataclass(frozen=True)
class EnsembleScorer:
    """The combined score, with the part `std`, the members' standard deviation on each answer. All members are in
    memory."""

    members: Sequence[Scorer]
    ensemble: Ensemble
    name: str = REWARD_MODEL_NAME

    def __call__(self, answers: Answers) -> Scored:
        """Every member scores every answer."""
        scores = [member(answers).total for member in self.members]
        total, std = self.ensemble(torch.tensor(scores, dtype=torch.float64))
        return Scored(total.tolist(), {"std": std.tolist()})
