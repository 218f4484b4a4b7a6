"""The share of every prompt: held out, demonstrations, preferences or PPO, and the validation rows of two of them.

The unit is the *opening*, the first user message with case and white space folded: two spellings of one question are in
one share. Openings are ordered by a hash of seed and text: the assignment does not depend on the order of the rows.

Each kind of row has its own share: demonstrations, pairs → preferences, bare prompts → PPO. It is used there, and in
every share for which the data have no rows of the own kind: a file of pairs alone fills all three shares, and of three
files for the three purposes each is used completely.

An opening is in one of the shares in which it can be used, or, where prompts are shared (`ingest.split.share`), in all
of them; validation openings are then the same for all, and not in PPO's share. Without SFT the share `demonstrations`
is empty, and a demonstration is used as a prompt."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rlhf_core.errors import UserError
from tasks.datasets.sources.example import Example, Kind
from tasks.params.ingest import SplitParams

Share = Literal["heldout", "demonstrations", "preferences", "ppo"]
Shares = frozenset[Share]

HOME: dict[Kind, Share] = {"demonstration": "demonstrations", "pair": "preferences", "prompt": "ppo"}
USABLE_IN: dict[Kind, tuple[Share, ...]] = {
    "demonstration": ("demonstrations", "preferences", "ppo"),
    "pair": ("demonstrations", "preferences", "ppo"),
    "prompt": ("preferences", "ppo"),
}
"""Shares in which a kind of row can be used: a bare prompt has no answer to imitate."""
HELDOUT: Shares = frozenset({"heldout"})
FEW_PROMPTS = 3000
"""With fewer training prompts they are shared, unless `ingest.split.share` says it."""
LOW = "low"
"""In place of the kind of a demonstration that is rated too low to imitate: it is used as a prompt, or by its
rating."""


@dataclass
class Assignment:
    """Openings → shares, and which openings of demonstrations and preferences are validation."""

    share: dict[str, Shares]
    """One share of each opening; several where prompts are `shared`."""
    validation: set[str]
    shared: bool

    def split(self, example: Example) -> str:
        """train or validation."""
        return "validation" if example.opening in self.validation else "train"

    def with_unknown(self, openings: Iterable[str], fraction: float, seed: int) -> "Assignment":
        """This assignment for data with more openings: each new one is validation with the probability `fraction`, by
        its own hash alone. Known openings keep their share and split."""
        unknown = {opening for opening in openings if opening not in self.share}
        drawn = {o for o in unknown if int.from_bytes(rank(seed, f"validation:{o}")) < fraction * 2**256}
        return Assignment(self.share, self.validation | drawn, self.shared)


Kinds = frozenset[str]
"""The kinds of rows, or `LOW`, that one opening has."""


def rank(seed: int, text: str) -> bytes:
    """The sort key of a text in a random order that depends on the seed only."""
    return hashlib.sha256(f"{seed}:{text}".encode()).digest()


def assign(
    examples: list[Example], split: SplitParams, seed: int, sft: bool = True, rewarded: bool = True
) -> Assignment:
    """The shares of every opening. Held-out rows of the data are the held-out share; without any, a fraction is drawn.
    `sft`, `rewarded`: whether the stages `sft` and `reward` train.

    Fractions are of distinct prompts, exact up to the prompts of one opening. Raises UserError for a share with too few
    prompts.
    """
    share: dict[str, Shares] = {example.opening: HELDOUT for example in examples if example.heldout}
    heldout = 0.0 if share else split.heldout
    training_rows = [example for example in examples if not example.heldout]
    strata, sizes = _strata(training_rows, sft), _sizes(training_rows)
    present = {kind for kinds in strata for kind in kinds} - {LOW}
    shared = shares_prompts(split, (1.0 - heldout) * sizes.total(), rewarded)
    if shared and not any(example.kind == "prompt" for example in training_rows):
        present -= {"prompt"}  # demonstrations that serve as prompts do not replace those of pairs
    for kinds, openings in strata.items():
        weights = _weights(kinds, present, split, sft)
        training = {Shares({name}): (1.0 - heldout) * weight for name, weight in weights.items()}
        if shared:
            training = {Shares(weights): 1.0 - heldout}
        ordered = sorted(openings, key=lambda opening: rank(seed, opening))
        share.update(_cut(ordered, sizes, {HELDOUT: heldout, **training}))
    validation = _validation(share, sizes, split.validation, seed)
    share.update({opening: share[opening] - {"ppo"} for opening in validation})
    _check_shares(share, validation, present, sft)
    return Assignment(share, validation, shared)


def shares_prompts(split: SplitParams, training_prompts: float, rewarded: bool) -> bool:
    """Whether SFT, reward model and PPO use the same prompts. `rewarded`: whether a reward model is trained."""
    return not rewarded or training_prompts < FEW_PROMPTS if split.share is None else split.share


def _strata(examples: Iterable[Example], sft: bool) -> dict[Kinds, list[str]]:
    """The openings by the kinds of their rows; without SFT a demonstration is a prompt."""
    kinds: dict[str, Kinds] = {}
    for example in examples:
        kind = LOW if example.low else example.kind
        as_prompt = not sft and example.kind == "demonstration"
        kinds[example.opening] = _joined(kinds.get(example.opening), "prompt" if as_prompt else kind)
    strata: dict[Kinds, list[str]] = {}
    for opening, found in kinds.items():
        strata.setdefault(found, []).append(opening)
    return strata


@cache
def _joined(kinds: Kinds | None, kind: str) -> Kinds:
    """The union as a cached object: a million openings have few distinct sets."""
    return (kinds or frozenset()) | {kind}


def _sizes(examples: Iterable[Example]) -> Counter[str]:
    """Distinct prompts of each opening."""
    prompts = {example.prompt_id: example.opening for example in examples}
    return Counter(prompts.values())


def _weights(kinds: Kinds, present: set[str], split: SplitParams, sft: bool) -> dict[Share, float]:
    """The shares in which openings with these kinds of rows can be used, with fractions that sum to 1."""
    provided = {home for kind, home in HOME.items() if kind in present}
    allowed: set[Share] = {home for kind, home in HOME.items() if kind in kinds}
    usable = {name for kind, names in USABLE_IN.items() if kind in kinds for name in names}
    usable |= {"preferences", "ppo"} if LOW in kinds else set()
    usable -= set() if sft else {"demonstrations"}
    allowed = allowed | (usable - provided) or usable
    fractions: dict[Share, float] = {
        "demonstrations": split.demonstrations,
        "preferences": split.preferences,
        "ppo": split.ppo,
    }
    total = sum(fractions[name] for name in allowed)
    return {name: fraction / total for name, fraction in fractions.items() if name in allowed}


def _cut(ordered: list[str], sizes: Mapping[str, int], weights: Mapping[Shares, float]) -> dict[str, Shares]:
    """Consecutive pieces of `ordered` in proportion to `weights`, in prompts; the middle of an opening decides."""
    total = sum(sizes[opening] for opening in ordered)
    names = [name for name in weights if weights[name] > 0]
    result: dict[str, Shares] = {}
    piece, boundary, position = 0, weights[names[0]] * total, 0.0
    for opening in ordered:
        middle = position + sizes[opening] / 2
        while middle > boundary and piece + 1 < len(names):
            piece += 1
            boundary += weights[names[piece]] * total
        result[opening] = names[piece]
        position += sizes[opening]
    return result


def _validation(share: Mapping[str, Shares], sizes: Mapping[str, int], fraction: float, seed: int) -> set[str]:
    """The openings of this fraction of both shares' prompts: at least one of each share, and never all. Both shares are
    in the same order: where they have the same prompts, these openings are the same."""
    chosen: set[str] = set()
    for name in ("demonstrations", "preferences"):
        members = [opening for opening, where in share.items() if name in where]
        ordered = sorted(members, key=lambda opening: rank(seed, f"validation:{opening}"))
        wanted = fraction * sum(sizes[opening] for opening in ordered)
        position = 0.0
        for number, opening in enumerate(ordered[:-1]):
            if number and position + sizes[opening] / 2 > wanted:
                break
            chosen.add(opening)
            position += sizes[opening]
    return chosen


def _check_shares(share: Mapping[str, Shares], validation: set[str], present: set[str], sft: bool) -> None:
    if sft and present <= {"prompt"}:
        raise UserError(
            "the training data have prompts only (or answers rated too low to imitate), and SFT needs demonstrations: "
            "add a file with prompt + response, messages, or prompt + chosen + rejected; or set sft.enabled: false, "
            "where the base model answers already"
        )
    least: dict[Share, int] = {"heldout": 1, "demonstrations": 2 if sft else 0, "preferences": 2, "ppo": 1}
    for name, number in least.items():
        members = [opening for opening, where in share.items() if name in where]
        if len(members) < number or (number and validation.issuperset(members)):
            raise UserError(
                f"too little data for ingest.split: the share {name} gets {len(members)} of {len(share)} distinct "
                f"openings and needs {number} (one of them for training); add data, or raise its fraction"
            )
