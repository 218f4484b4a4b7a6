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

SPLIT = SplitParams(demonstrations=0.5, preferences=0.3, ppo=0.2, heldout=0.1, validation=0.1)
ANSWERS = {"demonstration": {"response": "a"}, "pair": {"chosen": "a", "rejected": "b"}, "prompt": {}}


def make(kind, texts, *, heldout=False):
    return [
        Example("f", row, heldout, [{"role": "user", "content": text}], **ANSWERS[kind])
        for row, text in enumerate(texts, start=1)
    ]


def shares(examples, split=SPLIT, seed=1):
    return Counter(assign(examples, split, seed).share.values())


def texts(word, count):
    return [f"{word} {i}" for i in range(count)]


def test_fractions_are_exact():
    found = assign(make("pair", texts("q", 1000)), SPLIT, 1)
    assert Counter(found.share.values()) == {"heldout": 100, "demonstrations": 450, "preferences": 270, "ppo": 180}
    assert Counter(found.share[opening] for opening in found.validation) == {"demonstrations": 45, "preferences": 27}


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
    assert {found.share[row.opening] for row in rows} == {"heldout", "demonstrations", "preferences", "ppo"}


@given(
    groups=st.dictionaries(
        st.text("abcdef", min_size=1, max_size=4),
        st.sets(st.sampled_from(["demonstration", "pair", "prompt"]), min_size=1),
        min_size=40,
        max_size=60,
    ),
    seed=st.integers(0, 5),
)
@settings(max_examples=30, deadline=None)
def test_every_opening_has_one_share_that_it_can_serve(groups, seed):
    rows = [row for text, kinds in groups.items() for kind in sorted(kinds) for row in make(kind, [text])]
    try:
        found = assign(rows, SPLIT, seed)
    except UserError as error:
        assert "too little data" in str(error) or "prompts only" in str(error)  # noqa: PT017
        return
    assert set(found.share) == {row.opening for row in rows}
    assert found.validation <= {o for o, share in found.share.items() if share in {"demonstrations", "preferences"}}
    assert all(groups[o] != {"prompt"} for o, share in found.share.items() if share == "demonstrations")
    for share in ("demonstrations", "preferences"):
        members = {o for o, where in found.share.items() if where == share}
        assert members & found.validation
        assert members - found.validation


def by_kind(examples):
    share = assign(examples, SPLIT, 1).share
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
    wide = SplitParams(demonstrations=0.5, preferences=0.3, ppo=0.2, heldout=0.1, validation=1.0)
    found = assign(make("pair", texts("q", 30)), wide, 1)
    for share in ("demonstrations", "preferences"):
        assert {o for o, where in found.share.items() if where == share} - found.validation
