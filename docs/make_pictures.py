"""Draws docs/clipped-surrogate.svg and docs/gae.svg with the functions that train; a test compares the bytes.

python docs/make_pictures.py
"""

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from rlhf_core.ppo.advantages import compute_gae  # noqa: E402
from rlhf_core.ppo.losses import compute_ppo_loss  # noqa: E402
from tasks.page.canvas import INK, JUDGE, MUTED, POLICY, RULE, SFT, styled  # noqa: E402

CLIP_RATIO = 0.2
LOOK = {"svg.hashsalt": "leash", "text.parse_math": True, "mathtext.fontset": "dejavusans", "axes.titlesize": 11}


# the clipped surrogate


@dataclass(frozen=True)
class Case:
    """One of the four cases: an advantage, and a side of the clip."""

    ratio: float
    """The ratio at which the arrow points."""
    says: str
    place: tuple[float, float]
    """Position of the text, in units of the axes."""


CASES = {
    1.0: (
        Case(1.0, "① A > 0, ρ < 1 + ε:\ngradient, makes it likelier", (0.04, 0.92)),
        Case(1.4, "② A > 0, ρ ≥ 1 + ε:\nno gradient", (0.6, 0.44)),
    ),
    -1.0: (
        Case(1.0, "③ A < 0, ρ > 1 − ε:\ngradient, makes it less likely", (0.42, 0.92)),
        Case(0.6, "④ A < 0, ρ ≤ 1 − ε:\nno gradient", (0.04, 0.44)),
    ),
}


def surrogate(ratio: Tensor, advantage: float) -> tuple[Tensor, Tensor]:
    """PPO's objective for one token at each ratio, [N], and its gradient with respect to log π_θ, [N]."""
    logprobs = ratio.log().requires_grad_()
    one = torch.tensor(advantage, dtype=ratio.dtype)
    gains = [-compute_ppo_loss(logprob, torch.zeros_like(one), one, CLIP_RATIO) for logprob in logprobs]
    return torch.stack(gains).detach(), torch.autograd.grad(sum(gains), logprobs)[0]


def clipped_surrogate() -> Figure:
    """Two panels: A > 0 and A < 0."""
    figure = Figure(figsize=(9.0, 4.0))
    panels = figure.subplots(1, 2, gridspec_kw={"left": 0.065, "right": 0.99, "bottom": 0.2, "top": 0.93})
    for axes, advantage in zip(panels, CASES, strict=True):
        draw_surrogate(axes, advantage)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=3)
    return figure


def draw_surrogate(axes: Axes, advantage: float) -> None:
    """The objective over the ratio, in two colours for with and without a gradient, and its two cases."""
    ratio = torch.linspace(0.4, 1.6, 1201, dtype=torch.float64)
    values, gradient = surrogate(ratio, advantage)
    moves = gradient != 0
    axes.axvspan(1 - CLIP_RATIO, 1 + CLIP_RATIO, color=RULE, alpha=0.5, linewidth=0)
    axes.plot(ratio, ratio * advantage, color=SFT, linestyle=(0, (4, 2)), linewidth=1.2, label="ρA: without the clip")
    for part, colour, label in ((moves, POLICY, "clipped, with a gradient"), (~moves, JUDGE, "clipped, gradient 0")):
        axes.plot(ratio, values.where(part, torch.nan), color=colour, linewidth=3, label=label)
    for case in CASES[advantage]:
        mark(axes, case, advantage)
    axes.set_title(f"A {'> 0: better' if advantage > 0 else '< 0: worse'} than expected", loc="left")
    axes.set_xticks([0.4, 1 - CLIP_RATIO, 1, 1 + CLIP_RATIO, 1.6], ["0.4", "1 − ε", "1", "1 + ε", "1.6"])
    axes.set_xlabel(r"$\rho\ =\ \pi_\theta\ /\ \pi_{\mathrm{old}}$")
    axes.set_ylabel("min(ρA, clip(ρ, 1−ε, 1+ε)A)")


def mark(axes: Axes, case: Case, advantage: float) -> None:
    """The text of a case, with an arrow to its ratio on the curve."""
    values, _ = surrogate(torch.tensor([case.ratio], dtype=torch.float64), advantage)
    axes.annotate(
        case.says,
        xy=(case.ratio, values.item()),
        xytext=case.place,
        textcoords="axes fraction",
        va="top",
        color=INK,
        arrowprops={"arrowstyle": "-|>", "color": MUTED, "linewidth": 1, "shrinkB": 4},
    )


# generalised advantage estimation

TOKENS = ("Good", "options", "include", "oatmeal", "with", "berries", "“.”")
REWARDS = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.91)
"""The reward model's score at the last token, without a KL penalty."""
VALUES = (-0.28, -0.24, -0.21, -0.15, -0.07, -0.05, 0.0)
"""Values of a critic that predicts part of the score."""
GAMMA, LAM = 1.0, 0.95


def credit() -> tuple[Tensor, Tensor]:
    """δ and A of this answer, [T] each: GAE with λ = 0 and with λ = 0.95."""
    rewards = torch.tensor([REWARDS], dtype=torch.float64)
    values = torch.tensor([[*VALUES, 0.0]], dtype=torch.float64)
    mask = torch.ones_like(rewards)
    errors, advantages = (compute_gae(rewards, values, GAMMA, lam, mask)[0][0] for lam in (0.0, LAM))
    return errors, advantages


def gae() -> Figure:
    """Three panels over the tokens: rewards and values, one-step errors, advantages."""
    figure = Figure(figsize=(9.0, 5.8))
    margins = {"left": 0.065, "right": 0.99, "bottom": 0.06, "top": 0.95, "hspace": 0.28}
    above, middle, below = figure.subplots(3, 1, sharex=True, height_ratios=[1.3, 1, 1], gridspec_kw=margins)
    errors, advantages = credit()
    places = list(range(len(TOKENS)))
    draw_bars(above, list(REWARDS), SFT, r"$r_t$")
    above.plot(places, VALUES, color=JUDGE, marker="o", markersize=4)
    for t, value in enumerate(VALUES):
        above.text(t, value - 0.1, signed(value), color=JUDGE, ha="center", va="top")
    above.set_title(r"Reward $r_t$ (bars), the score at the last token, and value $V(s_t)$ (line)", loc="left")
    draw_bars(middle, errors.tolist(), MUTED, r"$\delta_t$")
    middle.set_title(r"One-step error  $\delta_t = r_t + \gamma V(s_{t+1}) - V(s_t)$", loc="left")
    draw_bars(below, advantages.tolist(), POLICY, r"$A_t$")
    below.set_title(
        r"Advantage  $A_t = \delta_t + \gamma\lambda A_{t+1}$,  from right to left  (γ = 1, λ = 0.95)", loc="left"
    )
    for t in places[1:]:
        draw_arrow_back(below, t, advantages[t].item())
    below.set_xticks(places, TOKENS)
    return figure


def draw_bars(axes: Axes, numbers: list[float], colour: str, name: str) -> None:
    """One bar per token, with its number above."""
    bars = axes.bar(range(len(numbers)), numbers, width=0.55, color=colour)
    axes.bar_label(bars, [signed(number) for number in numbers], padding=2)
    axes.set_ylabel(name, rotation=0, ha="right", va="center")
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.set_ylim(-0.65 if min(numbers) == 0 else -0.1, 1.25)
    axes.set_yticks([0, 0.5, 1])


def signed(number: float) -> str:
    return f"{number:+.2f}".replace("-", "−") if number else "0"


def draw_arrow_back(axes: Axes, t: int, advantage: float) -> None:
    """The arrow from token t to the token before, which receives γλ of its advantage."""
    axes.annotate(
        "",
        xy=(t - 0.7, advantage / 2),
        xytext=(t - 0.3, advantage / 2),
        arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0},
    )


PICTURES: dict[str, Callable[[], Figure]] = {"clipped-surrogate": clipped_surrogate, "gae": gae}


def svg(draw: Callable[[], Figure]) -> bytes:
    """A picture as SVG: equal numbers give equal bytes.

    So it has no date and no version, its ids come from a fixed salt, and no solver makes the layout: the last digits of
    a solver's result differ from call to call and are part of an id."""
    buffer = io.BytesIO()
    with styled(), mpl.rc_context(LOOK):
        draw().savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def write(folder: Path) -> None:
    """Write every picture into a folder."""
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_bytes(svg(draw))


if __name__ == "__main__":
    write(HERE)
