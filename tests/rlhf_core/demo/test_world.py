"""The demo world: distinct prompts, demonstrations of mixed quality, the same text for the same seed everywhere."""

import os
import subprocess
import sys
from statistics import fmean

import pytest

from rlhf_core.demo.phrases import RUNNING_EXAMPLE
from rlhf_core.demo.rubric import gold_score
from rlhf_core.demo.topics import DOMAIN_OF, TOPICS
from rlhf_core.demo.world import DemoWorld, all_prompts, parse
from rlhf_core.errors import UserError


def test_enough_distinct_prompts() -> None:
    prompts = DemoWorld(1).prompts(len(all_prompts()))
    assert len(set(prompts)) == len(prompts) >= 6000
    assert len({" ".join(prompt.casefold().split()) for prompt in prompts}) == len(prompts)


def test_running_example_is_always_there() -> None:
    assert RUNNING_EXAMPLE == "What are some healthy breakfast options for someone with diabetes?"
    assert DemoWorld(7).prompts(1) == [RUNNING_EXAMPLE]
    assert DemoWorld(7).prompts(50).count(RUNNING_EXAMPLE) == 1
    assert DemoWorld(7).prompts(0) == []


def test_seed_orders_prompts_and_fewer_are_a_prefix() -> None:
    assert DemoWorld(1).prompts(100) == DemoWorld(1).prompts(300)[:100]
    assert set(DemoWorld(1).prompts(100)) != set(DemoWorld(2).prompts(100))


@pytest.mark.parametrize("count", [-1, 10**6])
def test_impossible_counts_name_the_maximum(count: int) -> None:
    with pytest.raises(UserError, match=str(len(all_prompts()))):
        DemoWorld(1).prompts(count)


def test_a_sample_of_prompts_covers_every_topic_and_need() -> None:
    asked = {(q.topic.name, q.need) for q in map(parse, DemoWorld(1).prompts(4000)) if q is not None}
    assert asked == {(name, need) for name in TOPICS for need in DOMAIN_OF[name].needs}


def test_prompts_are_parsed_back_to_their_topic_and_need() -> None:
    question = parse("On a small budget, what are some fun camping trip ideas?")
    assert question is not None
    assert (question.topic.name, question.need) == ("camping trip", "budget")
    assert all(q is not None and q.need in DOMAIN_OF[q.topic.name].needs for q in map(parse, all_prompts()))
    assert parse("Explain why the sky is blue.") is None


def test_demonstrations_are_seeded() -> None:
    first, again, other = DemoWorld(1), DemoWorld(1), DemoWorld(2)
    prompts = first.prompts(50)
    answers = [first.demonstration(prompt, 0) for prompt in prompts]
    assert answers == [again.demonstration(prompt, 0) for prompt in reversed(prompts)][::-1]
    assert answers != [other.demonstration(prompt, 0) for prompt in prompts]
    assert answers != [first.demonstration(prompt, 1) for prompt in prompts]


def test_a_foreign_prompt_gets_no_demonstration() -> None:
    with pytest.raises(UserError, match="sky"):
        DemoWorld(1).demonstration("Explain why the sky is blue.", 0)
    with pytest.raises(UserError, match="breakfast"):
        DemoWorld(1).demonstration("What is breakfast?", 0)


def test_demonstrations_are_of_mixed_quality() -> None:
    world = DemoWorld(3)
    scores = [gold_score(prompt, world.demonstration(prompt, 0)) for prompt in world.prompts(3000)]
    share_good = fmean(score >= 3.8 for score in scores)
    share_bad = fmean(score < 0.5 for score in scores)
    assert 0.8 <= fmean(scores) <= 1.4
    assert 0.08 <= share_good <= 0.18
    assert 0.25 <= share_bad <= 0.5
    assert share_good + share_bad <= 0.8
    assert max(scores) == 5.0


def test_demonstrations_are_short_and_well_formed() -> None:
    world = DemoWorld(3)
    for prompt in world.prompts(1000):
        answer = world.demonstration(prompt, 0)
        assert answer[0].isupper()
        assert answer.endswith(".")
        assert ".." not in answer
        assert "{" not in answer
        assert len(answer.split()) <= 40
        assert len(prompt.split()) <= 20


def test_text_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "from rlhf_core.demo.world import DemoWorld; from rlhf_core.demo.rubric import gold_score\n"
        "world = DemoWorld(5)\n"
        "for p in world.prompts(200):\n"
        "    a = world.demonstration(p, 2); print(p, a, gold_score(p, a))\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
    assert outputs.pop().count(b"\n") == 200
