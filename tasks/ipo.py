"""Stage `ipo`: the SFT model trained on the preference pairs by identity preference optimisation (Azar et al. 2023)."""

from torch import Tensor

from rlhf_core.config.ipo import IPOConfig
from rlhf_core.dpo import PairObjective
from tasks.stage.stage import Stage
from tasks.training.preference_training import train_policy_on_pairs


def execute(stage: Stage[IPOConfig]) -> None:
    """Make models/ipo, plots/ipo.csv and metrics/ipo.json."""
    train_policy_on_pairs(stage, objective)


def objective(config: IPOConfig) -> PairObjective:
    """E[(h − 1/(2τ))²] over the pairs: equation 17 of Azar et al. 2023 (https://arxiv.org/abs/2310.12036).

    h is the log-ratio margin: log(π/π_ref) of the chosen less that of the rejected response, each summed over the
    tokens of the response as in the paper, in nats. The implicit margin is τ·h, as DPO's is β·h.
    """

    def loss(margin: Tensor) -> Tensor:
        return ((margin / config.tau - 1 / (2 * config.tau)) ** 2).mean()

    return PairObjective(config.tau, loss)
