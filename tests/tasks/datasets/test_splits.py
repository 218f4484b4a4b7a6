"""Splits: exact, disjoint, grouped by opening, independent of the order of rows, and fair to what each file is for."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.errors import UserError
from tasks.datasets.sources.example import Example
from tasks.datasets.sources.splits import assign
from tasks.params.ingest import SplitParams

SPLIT = SplitParams(share=False, demonstrations=0.5, preferences=0.3, ppo=0.2, heldout=0.1, validation=0.1)
SHARED = SPLIT.model_copy(update={"share": True})
ANSWERS = {"demonstration": {"response": "a"}, "pair": {"chosen": "a", "rejected": "b"}, "prompt": {}}


def make(kind, texts, *, heldout=False):
    return [
        Example("f", row, heldout, [{"role": "user", "content": text}], **ANSWERS[kind])
        for row, text in enumerate(texts, start=1)
    ]


def single(found):
    """Opening → its one share."""
    assert not found.shared
    return {opening: share for opening, (share,) in found.share.items()}


def shares(examples, split=SPLIT, seed=1, sft=True):
    return Counter(single(assign(examples, split, seed, sft)).values())


def texts(word, count):
    return [f"{word} {i}" for i in range(count)]


def test_fractions_are_exact():
    found = assign(make("pair", texts("q", 1000)), SPLIT, 1)
    share = single(found)
    assert Counter(share.values()) == {"heldout": 100, "demonstrations": 450, "preferences": 270, "ppo": 180}
    assert Counter(share[opening] for opening in found.validation) == {"demonstrations": 45, "preferences": 27}


def test_heldout_rows_of_the_data_are_the_heldout_share():
    found = shares(make("pair", texts("q", 100)) + make("pair", texts("h", 7), heldout=True))
    assert found == {"heldout": 7, "demonstrations": 50, "preferences": 30, "ppo": 20}


def test_order_of_rows_does_not_matter_and_the_seed_does():
    rows = make("pair", texts("q", 200))
    shuffled = random.Random(0).sample(rows, len(rows))
    assert assign(rows, SPLIT, 1) == assign(shuffled, SPLIT, 1)
    assert assign(rows, SPLIT, 1).share != assign(rows, SPLIT, 2).share


def test_spellings_of_one_opening_stay_together():
    rows = make("pair", [f"{wording} {i}" for i in range(50) for wording in ("What is", "what  IS", "What\nis")])
    found = assign(rows, SPLIT, 1)
    assert len(found.share) == 50
    assert set(single(found).values()) == {"heldout", "demonstrations", "preferences", "ppo"}


@given(
    groups=st.dictionaries(
        st.text("abcdef", min_size=1, max_size=4),
        st.sets(st.sampled_from(["demonstration", "pair", "prompt"]), min_size=1),
        min_size=40,
        max_size=60,
    ),
    seed=st.integers(0, 5),
    split=st.sampled_from([SPLIT, SHARED]),
)
@settings(max_examples=30)
def test_every_opening_has_shares_that_it_can_serve(groups, seed, split):
    rows = [row for text, kinds in groups.items() for kind in sorted(kinds) for row in make(kind, [text])]
    try:
        found = assign(rows, split, seed)
    except UserError as error:
        assert "too little data" in str(error) or "prompts only" in str(error)  # noqa: PT017
        return
    assert set(found.share) == {row.opening for row in rows}
    assert all(len(where) == 1 for where in found.share.values()) or found.shared
    assert found.validation <= {o for o, where in found.share.items() if where & {"demonstrations", "preferences"}}
    assert all(groups[o] != {"prompt"} for o, where in found.share.items() if "demonstrations" in where)
    assert found.validation.isdisjoint(o for o, where in found.share.items() if where & {"ppo", "heldout"})
    for share in ("demonstrations", "preferences"):
        members = {o for o, where in found.share.items() if share in where}
        assert members & found.validation
        assert members - found.validation


def by_kind(examples, sft=True):
    share = single(assign(examples, SPLIT, 1, sft))
    return {
        kind: Counter(share[e.opening] for e in examples if e.kind == kind and not e.heldout)
        for kind in sorted({e.kind for e in examples if not e.heldout})
    }


HELDOUT = make("demonstration", ["held out"], heldout=True)


def test_three_files_are_each_used_for_their_purpose():
    rows = make("demonstration", texts("d", 10)) + make("pair", texts("p", 20)) + make("prompt", texts("x", 30))
    assert by_kind(rows + HELDOUT) == {
        "demonstration": {"demonstrations": 10},
        "pair": {"preferences": 20},
        "prompt": {"ppo": 30},
    }


def test_a_missing_file_is_replaced_from_the_others():
    demos, pairs, prompts = (
        make("demonstration", texts("d", 70)),
        make("pair", texts("p", 80)),
        make("prompt", texts("x", 50)),
    )
    assert by_kind(demos + pairs + HELDOUT) == {
        "demonstration": {"demonstrations": 50, "ppo": 20},
        "pair": {"preferences": 48, "ppo": 32},
    }
    assert by_kind(pairs + prompts + HELDOUT) == {
        "pair": {"demonstrations": 50, "preferences": 30},
        "prompt": {"ppo": 50},
    }
    assert by_kind(demos + prompts + HELDOUT) == {
        "demonstration": {"demonstrations": 44, "preferences": 26},
        "prompt": {"preferences": 30, "ppo": 20},
    }


def test_the_same_prompts_in_two_files_are_divided():
    both = make("demonstration", texts("q", 100)) + make("pair", texts("q", 100))
    assert shares(both + HELDOUT) == {"heldout": 1, "demonstrations": 50, "preferences": 30, "ppo": 20}


def test_prompts_alone_are_not_enough():
    with pytest.raises(UserError, match="SFT needs demonstrations"):
        shares(make("prompt", texts("q", 100)))


def test_too_little_data_is_refused():
    with pytest.raises(UserError, match=r"too little data for ingest\.split: the share"):
        shares(make("pair", texts("q", 3)))


def test_validation_leaves_something_to_train_on():
    wide = SPLIT.model_copy(update={"validation": 1.0})
    found = assign(make("pair", texts("q", 30)), wide, 1)
    for share in ("demonstrations", "preferences"):
        assert {o for o, where in single(found).items() if where == share} - found.validation
    shared = assign(make("pair", texts("q", 30)), wide.model_copy(update={"share": True}), 1)
    assert Counter(shared.share.values())[frozenset({"demonstrations", "preferences", "ppo"})] == 1


def test_pairs_alone_serve_all_three_purposes_and_validation_prompts_none_but_itself():
    found = assign(make("pair", texts("q", 1000)), SHARED, 1)
    assert found.shared
    assert Counter(found.share.values()) == {
        frozenset({"heldout"}): 100,
        frozenset({"demonstrations", "preferences"}): 90,
        frozenset({"demonstrations", "preferences", "ppo"}): 810,
    }
    assert {o for o, where in found.share.items() if where == {"demonstrations", "preferences"}} == found.validation
    apart = assign(make("pair", texts("q", 1000)), SPLIT, 1)
    heldout = {o for o, where in apart.share.items() if "heldout" in where}
    assert heldout == {o for o, where in found.share.items() if "heldout" in where}, (
        "sharing changes no held-out prompt"
    )


def test_shared_prompts_serve_what_their_rows_are_for():
    """With demonstrations and pairs and no bare prompts, PPO takes the prompts of both."""
    rows = make("demonstration", texts("d", 100)) + make("pair", texts("p", 100)) + HELDOUT
    found = assign(rows, SHARED, 1)
    uses = {row.kind: set() for row in rows}
    for row in rows[:-1]:
        uses[row.kind] |= found.share[row.opening]
    assert uses == {"demonstration": {"demonstrations", "ppo"}, "pair": {"preferences", "ppo"}}


def test_without_sft_demonstrations_are_prompts_and_take_no_pairs_prompts_from_ppo():
    rows = make("demonstration", texts("d", 100)) + make("pair", texts("p", 100)) + make("prompt", texts("x", 100))
    for kinds, expected in (
        (("demonstration", "pair"), {"demonstration": {"ppo"}, "pair": {"preferences", "ppo"}}),
        (("demonstration", "pair", "prompt"), {"demonstration": {"ppo"}, "pair": {"preferences"}, "prompt": {"ppo"}}),
    ):
        used = [row for row in rows if row.kind in kinds]
        found = assign(used + HELDOUT, SHARED, 1, sft=False)
        uses = {row.kind: set() for row in used}
        for row in used:
            uses[row.kind] |= found.share[row.opening]
        assert uses == expected


def test_prompts_are_shared_where_no_reward_model_is_trained():
    default, many = SPLIT.model_copy(update={"share": None}), make("prompt", texts("q", 4000))
    assert assign(many, default, 1, sft=False, rewarded=False).shared
    assert not assign(many, default, 1, sft=False).shared
    assert not assign(many, SPLIT, 1, sft=False, rewarded=False).shared


def test_few_prompts_are_shared_and_many_are_not():
    few, many = make("pair", texts("q", 3300)), make("pair", texts("q", 3400))
    default = SPLIT.model_copy(update={"share": None})
    assert assign(few, default, 1).shared, "2,970 of them train"
    assert not assign(many, default, 1).shared
    assert not assign(many + make("pair", texts("h", 9), heldout=True), default, 1).shared


def test_without_sft_its_share_goes_to_the_others_and_prompts_are_enough():
    assert shares(make("prompt", texts("q", 500)) + HELDOUT, sft=False) == {
        "heldout": 1,
        "preferences": 300,
        "ppo": 200,
    }
    found = assign(make("prompt", texts("q", 100)), SHARED, 1, sft=False)
    assert set(found.share.values()) == {
        frozenset({"heldout"}),
        frozenset({"preferences"}),
        frozenset({"preferences", "ppo"}),
    }
    demos, pairs = make("demonstration", texts("d", 70)), make("pair", texts("p", 80))
    assert by_kind(demos + pairs + HELDOUT, sft=False) == {
        "demonstration": {"ppo": 70},
        "pair": {"preferences": 80},
    }
    assert by_kind(pairs + HELDOUT, sft=False) == {"pair": {"preferences": 48, "ppo": 32}}
