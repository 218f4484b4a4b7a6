"""`leash trace --against`: the first term of another trainer that differs, and why. The other trainer is written here
as plain loops over numbers."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from flows.cli import app
from flows.commands.trace.against import TERMS, compare, render
from rlhf_core.errors import UserError

LENGTHS, TIME, VOCABULARY = (3, 5, 2, 4), 6, 7
SETTINGS = {
    "gamma": 0.9, "lam": 0.8, "kl_coef": 0.1, "kl_estimator": "k1", "whiten_advantages": True,
    "clip_ratio": 0.2, "value_clip": 0.2, "vf_coef": 0.5, "entropy_coef": 0.01,
}  # fmt: skip
Write = Callable[..., Path]


def other_trainer(settings: dict[str, Any], differs: str = "") -> dict[str, Any]:
    """A step of random numbers. `differs`: what this trainer does otherwise."""
    random, s = np.random.default_rng(1), settings
    mask = np.array([[t < length for t in range(TIME)] for length in LENGTHS])
    tokens = random.integers(VOCABULARY, size=mask.shape)
    logits = torch.tensor(random.normal(size=(*mask.shape, VOCABULARY)), requires_grad=True)
    logprobs = torch.log_softmax(logits, -1).gather(-1, torch.from_numpy(tokens)[..., None])[..., 0]
    new = logprobs.detach().numpy()
    old, ref = (new + random.normal(scale=0.2, size=mask.shape) for _ in range(2))
    values, scores = random.normal(size=mask.shape), random.normal(size=len(mask))
    new_values = values + random.normal(scale=0.3, size=mask.shape)

    log_ratio = (ref - old) if differs == "reversed" else (old - ref)
    kl = np.exp(-log_ratio) - 1 + log_ratio if differs == "k3" else log_ratio
    gamma, lam = (s["lam"], s["gamma"]) if differs == "swapped" else (s["gamma"], s["lam"])
    extra = 1 if differs == "longer" else 0
    rewards, advantages = np.zeros(mask.shape), np.zeros(mask.shape)
    for row, length in enumerate(LENGTHS):
        rewards[row, :length] = -s["kl_coef"] * kl[row, :length]
        rewards[row, length - 1 + extra] += scores[row]
        after = 0.0
        for t in reversed(range(length + extra)):
            following = values[row, t + 1] if t + 1 < length + extra else 0.0
            after = rewards[row, t] + gamma * following - values[row, t] + gamma * lam * after
            advantages[row, t] = after
    flat = advantages[np.roll(mask, 1, axis=1) if differs == "shifted" else mask]
    white = (advantages - flat.mean()) / np.sqrt(flat.var(ddof=differs == "Bessel") + 1e-8)
    white = white + (flat.mean() if differs == "mean kept" else 0)
    if differs == "shifted":
        white[:, 0] = 0

    ratio, real = torch.exp(logprobs - torch.from_numpy(old)), torch.from_numpy(mask)
    gain = torch.from_numpy(white)
    losses = torch.maximum(-ratio * gain, -ratio.clamp(1 - s["clip_ratio"], 1 + s["clip_ratio"]) * gain)
    policy = losses[real].mean()
    if differs == "per answer":
        policy = torch.stack([losses[row, :length].mean() for row, length in enumerate(LENGTHS)]).mean()
    returns = advantages + values
    clipped = values + np.clip(new_values - values, -s["value_clip"], s["value_clip"])
    value = np.maximum((new_values - returns) ** 2, (clipped - returns) ** 2)[mask].mean()
    value = value * (0.5 if differs == "half" else 1)
    entropy = -(torch.softmax(logits, -1) * torch.log_softmax(logits, -1)).sum(-1)[real].mean()
    (policy - s["entropy_coef"] * entropy).backward()
    assert logits.grad is not None
    total = policy.item() + s["vf_coef"] * value - s["entropy_coef"] * entropy.item()
    arrays = {
        "mask": mask, "tokens": tokens, "old_logprobs": old, "ref_logprobs": ref, "values": values, "scores": scores,
        "logprobs": new, "new_values": new_values, "logits": logits.detach().numpy(),
        "kl": kl, "rewards": rewards, "advantages": advantages, "whitened_advantages": white, "returns": returns,
        "ratio": ratio.detach().numpy(), "policy_loss": policy.item(), "value_loss": value, "entropy": entropy.item(),
        "total_loss": total, "logits_grad_norm": logits.grad.norm().item(),
    }  # fmt: skip
    for name in ("old_logprobs", "ref_logprobs", "kl", "ratio", "whitened_advantages"):
        near = mask | np.roll(mask, 1, axis=1)
        arrays[name] = np.where(near, arrays[name], np.nan)  # padding may hold anything
    return arrays | {"settings": json.dumps(settings)}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(differs, name=array or None, …) -> a file of the step."""

    def write(differs: str = "", **changes: Any) -> Path:
        arrays = other_trainer(SETTINGS, differs) | changes
        path = tmp_path / "step.npz"
        np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
        return path

    return write


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_an_equal_trainer_has_no_difference(write: Write, dtype: str) -> None:
    """In every term, the gradient included."""
    floats = {
        name: one for name, one in other_trainer(SETTINGS).items() if getattr(one, "dtype", np.bool_) == "float64"
    }
    found = compare(write(**{name: one.astype(dtype) for name, one in floats.items()}))
    assert found["first"] is None
    assert [one["verdict"] for one in found["terms"]] == ["equal"] * len(TERMS)
    assert found["dtype"] == dtype
    assert render(found).endswith("no term differs")


@pytest.mark.parametrize(
    ("differs", "first", "reason"),
    [
        ("k3", "kl", "the KL estimator is k3"),
        ("reversed", "kl", "the KL is log π_ref − log π"),
        ("longer", "rewards", "the mask has one token more after each answer"),
        ("swapped", "advantages", "γ and λ are swapped"),
        ("Bessel", "whitened_advantages", "the variance is divided by n − 1: Bessel's correction"),
        ("mean kept", "whitened_advantages", "whitening keeps the mean (shift_mean=False)"),
        ("shifted", "whitened_advantages", "the mask is shifted by one token to the right"),
        ("per answer", "policy_loss", "the mean is per answer, then over answers, not over all tokens"),
        ("half", "value_loss", "the value loss has the factor ½"),
    ],
)
def test_the_first_difference_and_its_reason(write: Write, differs: str, first: str, reason: str) -> None:
    found = compare(write(differs))
    terms = {one["term"]: one for one in found["terms"]}
    assert (found["first"], terms[first]["reasons"]) == (first, [reason])
    others = {name for name, one in terms.items() if one["verdict"] != "equal"} - {first}
    assert others <= {"longer": {"advantages"}, "per answer": {"logits_grad_norm"}}.get(differs, set())
    assert f"first difference: {first}" in render(found)


def test_an_unknown_difference_has_its_place(write: Write) -> None:
    advantages = other_trainer(SETTINGS)["advantages"]
    advantages[1, 3] += 0.125
    found = compare(write(advantages=advantages))
    [one] = [one for one in found["terms"] if one["term"] == "advantages"]
    assert (found["first"], one["place"], one["reasons"]) == ("advantages", "answer 2, token 4", [])
    assert one["there"][1] - one["there"][0] == pytest.approx(0.125)
    assert "no known difference" in render(found)


def test_terms_that_are_not_in_the_file(write: Write) -> None:
    """A file of a rollout alone has no losses; without logits there is no gradient."""
    update = ("logprobs", "new_values", "ratio", "policy_loss", "value_loss", "total_loss")
    logits = ("tokens", "logits", "entropy", "logits_grad_norm")
    settings = json.dumps({name: SETTINGS[name] for name in list(SETTINGS)[:5]})
    found = compare(write(settings=settings, **dict.fromkeys((*update, *logits))))
    assert [one["verdict"] for one in found["terms"]] == ["equal"] * 5 + ["not in the file"] * (len(TERMS) - 5)
    found = compare(write(total_loss=None, **dict.fromkeys(logits)))
    verdicts = {one["term"]: one["verdict"] for one in found["terms"]}
    assert (verdicts["logprobs"], verdicts["logits_grad_norm"]) == ("needs logits", "not in the file")
    assert found["first"] is None


HOLE = np.array([[1, 0, 1, 0, 0, 0]] * 4)
NAN = np.full((4, TIME), np.nan)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"values": None}, "missing: values"),
        ({"logits": None}, "missing: logits"),
        ({"advantage": NAN}, "advantage: unknown array; did you mean advantages?"),
        ({"scores": NAN}, "scores: shape [4, 6]; with this mask it is [4]"),
        ({"values": NAN}, "values: not finite at answer 1, token 1"),
        ({"old_logprobs": np.full((4, TIME), -800.0)}, "our ratio is not finite at answer 1, token 1"),
        ({"mask": HOLE}, "mask: answer 1 does not begin with its tokens"),
        ({"mask": NAN}, "mask: give [answers, tokens] of 0 and 1"),
        ({"tokens": np.full((4, TIME), 7)}, "tokens: not below 7"),
        ({"rewards": np.ones((4, TIME), dtype=int)}, "rewards: int64; give float32 or float64"),
        ({"kl": np.array([None])}, "no .npz file of plain arrays"),
        ({"settings": "{"}, "settings: no valid JSON"),
        ({"settings": "[]"}, "settings: expected a JSON object"),
        ({"settings": "{}"}, "settings: missing: gamma, lam, kl_coef"),
        ({"settings": json.dumps(SETTINGS | {"cliprange": 1})}, "settings.cliprange: unknown parameter"),
        ({"settings": json.dumps(SETTINGS | {"gamma": "1"})}, "settings.gamma: "),
        (dict.fromkeys(set(TERMS) - {"logprobs"}), "no term to compare"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_what_cannot_be_compared_is_refused_by_name(write: Write, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        compare(write(**changes))
    assert words in str(refused.value)
    assert "step.npz: " in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_command(write: Write, tmp_path: Path) -> None:
    """Exit code 1 where a term differs; it needs no project."""
    equal = CliRunner().invoke(app, ["trace", "--against", str(write())])
    assert (equal.exit_code, equal.stdout.splitlines()[-1]) == (0, "no term differs")
    found = CliRunner().invoke(app, ["trace", "--against", str(write("half")), "--json"])
    assert (found.exit_code, json.loads(found.stdout)["first"]) == (1, "value_loss")
    (tmp_path / "text.npz").write_text("no archive")
    np.savez_compressed(tmp_path / "damaged.npz", values=np.arange(1000.0))
    whole = (tmp_path / "damaged.npz").read_bytes()
    for place in range(50, len(whole)):  # the first that is not found by the sum of the archive
        content = bytearray(whole)
        content[place] ^= 0xFF
        (tmp_path / "damaged.npz").write_bytes(content)
        try:
            np.load(tmp_path / "damaged.npz")["values"]
        except zlib.error:
            break
    else:
        raise AssertionError("no byte is found")
    np.save(tmp_path / "one.npy", NAN)
    for name in ("text.npz", "damaged.npz", "nowhere.npz", "one.npy"):
        assert CliRunner().invoke(app, ["trace", "--against", str(tmp_path / name)]).exit_code == 2
    assert CliRunner().invoke(app, ["trace", "eat?", "--against", str(write())]).exit_code == 2
    assert CliRunner().invoke(app, ["trace"]).exit_code == 2
