"""`leash trace --against`: the terms of one PPO step of another trainer beside ours, in the order of computation. The
step is an .npz file; docs/how-to/other-trainers.md lists its arrays and settings."""

import json
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from flows.text import table
from rlhf_core.config.block import Block, NotNegative, PositiveNumber
from rlhf_core.errors import UserError, did_you_mean
from rlhf_core.models.masked import masked_log_softmax, masked_mean, zero_padding
from rlhf_core.ppo.advantages import VARIANCE_FLOOR, compute_gae, deviation, reward_to_go, whiten
from rlhf_core.ppo.kl import estimate_kl
from rlhf_core.ppo.losses import compute_ppo_total_loss, policy_ratio
from rlhf_core.ppo.objective import answer_weights
from rlhf_core.ppo.rewards import shape_rewards
from tasks.params.loader import parse

Unit = Annotated[float, Field(ge=0, le=1)]
ROUNDING = {"float64": 1e-11, "float32": 1e-5, "float16": 0.01, "bfloat16": 0.05}
"""Largest difference that rounding explains, as a share of the numbers that a term is made of."""

REQUIRED, UPDATE = ("mask", "old_logprobs", "ref_logprobs", "values", "scores"), ("logprobs", "new_values")
WITH_LOGITS = ("tokens", "logits")
"""Arrays of the file: those of the rollout, those of one pass of the update, and those of entropy and gradient."""
WITH_VOCABULARY = ("logprobs", "entropy", "total_loss", "logits_grad_norm")
SCALARS = ("policy_loss", "value_loss", "entropy", "total_loss", "logits_grad_norm")

ROLLOUT_SETTINGS = ("gamma", "lam", "kl_coef", "kl_estimator", "whiten_advantages")
UPDATE_SETTINGS = ("clip_ratio", "value_clip", "vf_coef", "entropy_coef")
"""Settings that a file must have, the second ones where it has a pass of the update."""

TERMS = {
    "kl": ("k1", "k2", "k3", "reversed"),
    "rewards": ("longer", "shorter", "kl added", "no score", "rewards whitened"),
    "advantages": ("swapped", "longer", "shorter", "shifted", "padding"),
    "returns": ("whitened", "to go", "longer"),
    "whitened_advantages": ("Bessel", "mean kept", "longer", "shorter", "shifted", "padding", "not whitened"),
    "logprobs": (),
    "ratio": (),
    "policy_loss": ("per answer", "sum", "all positions", "longer", "shorter", "shifted", "not whitened"),
    "value_loss": ("half", "unclipped", "per answer", "sum", "all positions", "longer", "shorter", "shifted"),
    "entropy": ("per answer", "sum", "all positions", "longer"),
    "total_loss": ("half", "entropy added"),
    "logits_grad_norm": ("per answer", "sum", "all positions", "not whitened"),
}
"""Terms in the order of computation, with the known differences between trainers that may change each."""
CHANGES = {
    "k1": "the KL estimator is k1",
    "k2": "the KL estimator is k2",
    "k3": "the KL estimator is k3",
    "reversed": "the KL is log π_ref − log π",
    "longer": "the mask has one token more after each answer",
    "shorter": "the mask leaves out the last token of each answer",
    "shifted": "the mask is shifted by one token to the right",
    "kl added": "the KL is added to the reward, not subtracted",
    "no score": "the score is not in the rewards",
    "rewards whitened": "the rewards are whitened, with their mean",
    "swapped": "γ and λ are swapped",
    "padding": "padding counts as tokens",
    "whitened": "the returns are made of whitened advantages",
    "to go": "the returns are sums of rewards, without values",
    "Bessel": "the variance is divided by n − 1: Bessel's correction",
    "mean kept": "whitening keeps the mean (shift_mean=False)",
    "not whitened": "the advantages are not whitened",
    "per answer": "the mean is per answer, then over answers, not over all tokens",
    "sum": "the loss is the sum over tokens, not the mean",
    "all positions": "the sum is divided by all positions, padding included",
    "half": "the value loss has the factor ½",
    "unclipped": "the value loss is not clipped",
    "entropy added": "the entropy is added to the loss, not subtracted",
}


class Settings(Block):
    """The other trainer's settings, under our names; `settings` in the file, as JSON."""

    gamma: Unit
    lam: Unit
    kl_coef: NotNegative
    kl_estimator: Literal["k1", "k2", "k3"]
    whiten_advantages: bool
    clip_ratio: PositiveNumber = 0.2
    clip_ratio_high: PositiveNumber | None = None
    value_clip: PositiveNumber | None = None
    """None: values are not clipped."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    vf_coef: NotNegative = 0.5
    entropy_coef: NotNegative = 0.0
    dtype: Literal["float64", "float32", "float16", "bfloat16"] | None = None
    """In which the trainer computed, where it is coarser than the arrays."""


@dataclass(frozen=True)
class Step:
    """One step of another trainer. Arrays are float64, so that differences are those of the other trainer."""

    settings: Settings
    arrays: dict[str, Tensor]
    mask: Tensor
    dtype: str


def read_step(path: Path) -> Step:
    """The step in the file. Raises UserError, with the array or key, for all that is missing, unknown, of another
    shape, or not finite on a real token."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise UserError(f"{path}: file not found; write it as docs/how-to/other-trainers.md shows") from None
    except Exception as error:  # of a dozen kinds, for a file that is damaged, encrypted or of another format
        raise UserError(f"{path}: no .npz file of plain arrays ({' '.join(str(error).split())})") from None
    terms = [name for name in TERMS if name not in UPDATE]
    known = [*REQUIRED, *UPDATE, *WITH_LOGITS, *terms, "settings"]
    if unknown := [name for name in found if name not in known]:
        raise UserError(f"{path}: {unknown[0]}: unknown array{did_you_mean(unknown[0], known)}; leave it out")
    update = bool(found.keys() & {*UPDATE, "ratio", "policy_loss", "value_loss", "total_loss"})
    logits = bool(found.keys() & {*WITH_LOGITS, "entropy", "logits_grad_norm"})
    needed = ["settings", *REQUIRED, *(UPDATE if update or logits else ()), *(WITH_LOGITS if logits else ())]
    if missing := [name for name in needed if name not in found]:
        raise UserError(f"{path}: missing: {', '.join(missing)}; see docs/how-to/other-trainers.md")
    if not found.keys() & set(terms):
        raise UserError(f"{path}: no term to compare; add at least one of {', '.join(terms)}")
    try:
        content = json.loads(str(found.pop("settings")[()]))
    except ValueError as error:
        raise UserError(f"{path}: settings: no valid JSON ({error}); write json.dumps(…)") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: settings: expected a JSON object of names and values")
    used = [*ROLLOUT_SETTINGS, *(UPDATE_SETTINGS if "logprobs" in found else ())]
    if lacking := [name for name in used if name not in content]:
        raise UserError(f"{path}: settings: missing: {', '.join(lacking)}; see docs/how-to/other-trainers.md")
    settings = parse(Settings, content, "settings", path)
    if settings.entropy_coef and "total_loss" in found and "logits" not in found:
        raise UserError(f"{path}: logits: missing; the entropy bonus (entropy_coef) of total_loss is made of them")

    real = found["mask"]
    if real.ndim != 2 or not real.size or not np.isin(real, (0, 1)).all():
        raise UserError(f"{path}: mask: give [answers, tokens] of 0 and 1, not {real.dtype} {list(real.shape)}")
    mask = torch.from_numpy(real.astype(bool))
    for row, one in enumerate(mask.int().tolist(), start=1):
        if sorted(one, reverse=True) != one or not one[0]:
            raise UserError(f"{path}: mask: answer {row} does not begin with its tokens; put its padding at the end")
    arrays, types = dict[str, Tensor](), {settings.dtype or "float64"}
    for name, array in found.items():
        shape: tuple[int, ...] = () if name in SCALARS else real.shape[: 1 if name == "scores" else 2]
        if array.shape[: len(shape)] != shape or array.ndim != len(shape) + (name == "logits"):
            wanted = [*shape, *(["vocabulary"] if name == "logits" else [])]
            raise UserError(f"{path}: {name}: shape {list(array.shape)}; with this mask it is {wanted}")
        if name in ("mask", "tokens"):
            if array.dtype.kind not in ("iu" if name == "tokens" else "biuf"):
                raise UserError(f"{path}: {name}: {array.dtype}; give whole numbers")
            arrays[name] = torch.from_numpy(array.astype(np.int64))
            continue
        if array.dtype.name not in ROUNDING:
            raise UserError(f"{path}: {name}: {array.dtype}; give float32 or float64")
        types.add(array.dtype.name)
        tensor = torch.from_numpy(
            array.astype(np.float64 if name != "logits" or array.dtype == np.float64 else np.float32)
        )
        bad = ~torch.isfinite(tensor) if name != "logits" else (tensor.isnan() | (tensor == torch.inf)).any(-1)
        bad = bad & mask if bad.ndim == 2 else bad
        if bad.any():
            raise UserError(f"{path}: {name}: not finite at {_place(bad.int())}; correct the step that was written")
        arrays[name] = tensor if name == "logits" else tensor.nan_to_num(0.0, 0.0, 0.0)  # padding may hold anything
    if "logits" in arrays:
        tokens, vocabulary = arrays["tokens"], arrays["logits"].shape[-1]
        wrong = mask & ((tokens < 0) | (tokens >= vocabulary))
        if wrong.any():
            raise UserError(f"{path}: tokens: not below {vocabulary}, the width of logits, at {_place(wrong.int())}")
        arrays["tokens"] = torch.where(mask, tokens, 0)
    return Step(settings, arrays, mask, max(types, key=lambda name: ROUNDING[name]))


def terms_of(step: Step, changes: Collection[str] = ()) -> dict[str, Tensor]:
    """Our terms by name, each computed from the terms before it in the file, or from ours where it has none. So a
    difference in one term makes no difference in the next. `changes`: of `CHANGES`, made in every term."""
    s, given, mask = step.settings, step.arrays, step.mask
    if "longer" in changes:
        mask = _longer(mask)
    if "shorter" in changes:
        mask = mask & torch.nn.functional.pad(mask[:, 1:], (0, 1))
    if "shifted" in changes:
        mask = torch.nn.functional.pad(mask[:, :-1], (1, 0))
    if "padding" in changes:
        mask = torch.ones_like(mask)
    ours: dict[str, Tensor] = {}

    def before(name: str) -> Tensor:
        return given.get(name, ours[name])

    kind = next((name for name in ("k1", "k2", "k3") if name in changes), s.kl_estimator)
    pair = (given["ref_logprobs"], given["old_logprobs"])
    ours["kl"] = estimate_kl(*(pair if "reversed" in changes else pair[::-1]), kind, mask)
    scores = given["scores"] * ("no score" not in changes)
    beta = -s.kl_coef if "kl added" in changes else s.kl_coef
    ours["rewards"] = shape_rewards(scores, zero_padding(before("kl"), step.mask), mask, beta)
    if "rewards whitened" in changes:
        ours["rewards"] = whiten(ours["rewards"], mask, shift_mean=False)
    gamma, lam = (s.lam, s.gamma) if "swapped" in changes else (s.gamma, s.lam)
    values = torch.nn.functional.pad(given["values"], (0, 1))
    ours["advantages"], _ = compute_gae(before("rewards"), values, gamma, lam, mask)
    is_white = s.whiten_advantages and "not whitened" not in changes
    white = before("advantages")
    if is_white:
        white = whiten(white, mask, shift_mean="mean kept" not in changes)
    if "Bessel" in changes:
        square, count = deviation(before("advantages"), mask) ** 2, mask.sum()
        unbiased = (square - VARIANCE_FLOOR) * count / (count - 1).clamp(min=1) + VARIANCE_FLOOR
        white = white * (square / unbiased).sqrt()
    ours["whitened_advantages"] = zero_padding(white, mask)
    made_of = before("whitened_advantages" if "whitened" in changes else "advantages")
    ours["returns"] = zero_padding(made_of + given["values"], mask)
    if "to go" in changes:
        ours["returns"] = reward_to_go(before("rewards"), mask)
    if "logprobs" not in given:
        return ours

    logits, logprobs = given.get("logits"), given["logprobs"]
    if logits is not None:
        logits = logits.clone().requires_grad_()
        read = masked_log_softmax(logits, mask).gather(-1, given["tokens"][..., None])[..., 0]
        logprobs = ours["logprobs"] = zero_padding(read, mask)
    ours["ratio"] = policy_ratio(given["logprobs"], given["old_logprobs"], "token", mask)
    lengths = mask.sum(dim=1, keepdim=True).double()
    average = "answer_means" if "per answer" in changes else "tokens"
    divisor = 1.0 if "sum" in changes else mask.numel() if "all positions" in changes else lengths.sum().item()
    weights = mask * answer_weights(average, lengths, lengths.mean().item(), mask.shape[1]) / divisor  # type: ignore[arg-type]
    losses = compute_ppo_total_loss(
        logprobs,
        given["old_logprobs"],
        before("advantages" if "not whitened" in changes else "whitened_advantages"),
        given["new_values"],
        before("returns"),
        logits,
        s.clip_ratio,
        mask=mask,
        old_values=given["values"],
        clip_value=s.value_clip is not None and "unclipped" not in changes,
        value_clip_ratio=s.value_clip or 0.0,
        entropy=None if logits is not None else torch.zeros_like(logprobs),
        clip_ratio_high=s.clip_ratio_high,
        dual_clip=s.dual_clip,
        reduction="none",
    )
    ours |= {name: (losses[name] * weights).sum() for name in ("policy_loss", "value_loss")}
    ours["value_loss"] = ours["value_loss"] * (0.5 if "half" in changes else 1.0)
    bonus = torch.zeros(())
    if logits is not None:
        ours["entropy"] = (losses["entropy"] * weights).sum()
        (slope,) = torch.autograd.grad(ours["policy_loss"] - s.entropy_coef * ours["entropy"], logits)
        ours["logits_grad_norm"] = slope.norm()
        bonus = s.entropy_coef * before("entropy") * (-1 if "entropy added" in changes else 1)
    share = 0.5 if "half" in changes else 1.0
    ours["total_loss"] = before("policy_loss") + share * s.vf_coef * before("value_loss") - bonus
    return {name: ours[name].detach() for name in TERMS if name in ours}


def compare(path: Path) -> dict[str, Any]:
    """Every term of the file beside ours: the figure, or the mean over tokens; the largest difference and its place;
    and the known differences that give their numbers. `first`: the first term that differs, or None."""
    step = read_step(path)
    ours, rows = terms_of(step), list[dict[str, Any]]()
    for name, term in ours.items():
        known = (zero_padding(term, step.mask) if term.ndim else term).isfinite()
        if not known.all():
            place = _place((~known).float()) if known.ndim else "the step"
            raise UserError(
                f"{path}: our {name} is not finite at {place}; look at the log-probabilities and mask there"
            )
    for name in TERMS:
        theirs = step.arrays.get(name)
        one: dict[str, Any] = {"term": name, "ours": None, "theirs": None}
        rows.append(one)
        if name in ours:
            one["ours"] = (masked_mean(ours[name], step.mask) if ours[name].ndim else ours[name]).item()
        if name not in ours or theirs is None:
            one["verdict"] = "not in the file" if theirs is None else "needs logits"
            continue
        one["theirs"] = (masked_mean(theirs, step.mask) if theirs.ndim else theirs).item()
        difference, allowed = _difference(name, ours[name], theirs, step, step.mask)
        one |= {"difference": difference.max().item(), "allowed": allowed, "verdict": "equal"}
        if one["difference"] > allowed:
            worst = int(difference.argmax())
            one |= {"verdict": "DIFFERS", "place": _place(difference) if difference.ndim else ""}
            one["there"] = [term.flatten()[worst].item() for term in (ours[name], theirs)]
            one["reasons"] = [CHANGES[change] for change in _explain(name, theirs, step)]
            one["tried"] = [CHANGES[change] for change in TERMS[name]]
    first = next((one["term"] for one in rows if one["verdict"] == "DIFFERS"), None)
    answers, tokens = len(step.mask), int(step.mask.sum())
    return {"file": str(path), "answers": answers, "tokens": tokens, "dtype": step.dtype, "first": first, "terms": rows}


def _explain(name: str, theirs: Tensor, step: Step) -> tuple[str, ...]:
    """The one change, or the two, with which our term is theirs; empty where there is none."""
    if name not in WITH_VOCABULARY:  # these need no pass over the logits
        step = replace(step, arrays={key: array for key, array in step.arrays.items() if key != "logits"})
    for changes in [each for number in (1, 2) for each in combinations(TERMS[name], number)]:
        mask = _longer(step.mask) if {"longer", "shifted"} & set(changes) else step.mask
        difference, allowed = _difference(name, terms_of(step, changes)[name], theirs, step, mask)
        if math.isfinite(allowed) and difference.max().item() <= allowed:
            return changes
    return ()


def _difference(name: str, ours: Tensor, theirs: Tensor, step: Step, mask: Tensor) -> tuple[Tensor, float]:
    """|ours − theirs|, 0 on padding, and how large it may be."""
    if ours.ndim:
        ours, theirs = zero_padding(ours, mask), zero_padding(theirs, mask)
    made_of, in_units = [ours, theirs], {"rewards", "advantages", "returns"}
    if not step.settings.whiten_advantages:
        in_units |= {"whitened_advantages", "policy_loss", "total_loss"}
    if name in in_units:
        made_of += [step.arrays["scores"], zero_padding(step.arrays["values"], step.mask)]
    elif name not in ("value_loss", "logits_grad_norm"):  # nats, ratios, means of whitened advantages
        made_of.append(torch.ones(()))
    return (ours - theirs).abs(), ROUNDING[step.dtype] * max(part.abs().max().item() for part in made_of)


def _longer(mask: Tensor) -> Tensor:
    """The mask with one more token behind each answer that has room for it."""
    return mask | torch.nn.functional.pad(mask[:, :-1], (1, 0))


def _place(of: Tensor) -> str:
    """The answer and token, from 1, of the largest number."""
    places = [int(place) + 1 for place in np.unravel_index(int(of.argmax()), tuple(of.shape))]
    return ", ".join(f"{word} {place}" for word, place in zip(("answer", "token"), places, strict=False))


def render(found: dict[str, Any]) -> str:
    """The table of terms, then a line for each that differs, the first one first."""

    def figure(value: float | None) -> str:
        return "–" if value is None else f"{value:.6g}".replace("-", "−")

    rows = [("term", "ours", "theirs", "largest difference", "")]
    for one in found["terms"]:
        figures = (figure(one[key]) for key in ("ours", "theirs"))
        rows.append((one["term"], *figures, figure(one.get("difference")), one["verdict"]))
    lines = [
        f"{found['file']}: {found['answers']} answers, {found['tokens']} tokens, {found['dtype']}",
        f"{table(rows)}\nours: from the terms before it in the file; terms of tokens: the mean over real tokens",
    ]
    for one in found["terms"]:
        if one["verdict"] != "DIFFERS":
            continue
        ours, theirs = map(figure, one["there"])
        head = "first difference: " if one["term"] == found["first"] else ""
        text = f"{head}{one['term']}{', at ' + one['place'] if one['place'] else ''}: ours {ours}, theirs {theirs}"
        reasons = [f"  likely reason: in theirs, {' and '.join(one['reasons'])} (with this, ours is equal)"]
        if not one["reasons"]:
            reasons = ["  no known difference gives theirs; tried, one or two of them:"] if one["tried"] else []
            reasons += [f"    {reason}" for reason in one["tried"]]
        lines.append("\n".join([text, *reasons]))
    return "\n\n".join(lines if found["first"] else [*lines, "no term differs"])
