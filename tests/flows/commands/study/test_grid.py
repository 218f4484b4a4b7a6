"""What a study's overrides mean: its trials, their names, and what is refused before anything runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from flows import workspace
from flows.commands.study import trials as made
from flows.commands.study.trials import Trial
from rlhf_core.errors import UserError
from tasks.params.methods import BY_NAME
from tests.conftest import ROOT, call, commit

OVERRIDES = ("ppo.kl.coef=0.05,0.1", "seed=range(1,3)", "sft.epochs=2")


def trials(*overrides: str, methods: tuple[str, ...] = ()) -> list[Trial]:
    return made.grid("betas", made.read_space(overrides, methods))


def test_every_combination_with_every_seed() -> None:
    found = trials(*OVERRIDES)
    assert [each.name for each in found] == [
        "betas-coef=0.05-seed=1", "betas-coef=0.05-seed=2", "betas-coef=0.1-seed=1", "betas-coef=0.1-seed=2",
    ]  # fmt: skip
    assert found[1].overrides == ("sft.epochs=2", "ppo.kl.coef=0.05", "seed=2")
    assert found[1].setting == (("ppo.kl.coef", "0.05"),)


def test_without_a_list_there_is_one_trial() -> None:
    (only,) = trials()
    assert (only.name, only.overrides) == ("betas", ())


def test_methods_switch_the_alternatives() -> None:
    (only,) = trials(methods=("ppo", "dpo"))
    on = [text for text in only.overrides if text.endswith("=true")]
    assert on == ["++dpo.enabled=true"]
    assert len(only.overrides) == len(BY_NAME)


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["ppo.kl.coef", "dpo.beta"], ["coef", "beta"]),
        (["ppo.learning_rate", "sft.learning_rate"], ["ppo.learning_rate", "sft.learning_rate"]),
        (["a.b", "b"], ["a.b", "b"]),
    ],
)
def test_names_are_as_short_as_they_can_be(names: list[str], short: list[str]) -> None:
    assert made.short_names(names) == short


@pytest.mark.parametrize(
    ("overrides", "methods", "says"),
    [
        (("a=(",), (), "-S a=(: Error parsing override"),
        (("a=1", "a=2"), (), "-S a=2: a is given twice; write NAME=A,B"),
        (("seed=a,b",), (), "-S seed=a,b: seeds are whole numbers from 0"),
        (("case=1,2",), (), "-S case=1,2: cases are written into a study file"),
        (("+a=1,2",), (), "a parameter that params.yaml does not have can take one value only"),
        (("a=interval(0,1)",), (), "an interval needs --search N"),
        (("a=range(0,2000)",), (), "2000 trials are more than 1000"),
        (("a=0.1,0.1",), (), "two trials would be named betas-a=0.1"),
        ((), ("dop",), "--methods dop; did you mean dpo?; there are: ppo, "),
    ],
)
def test_what_is_refused(overrides: tuple[str, ...], methods: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError) as refused:
        trials(*overrides, methods=methods)
    assert says in str(refused.value)


@pytest.fixture
def home(toy: Callable[..., Path]) -> Path:
    """A repository with the project's params.yaml."""
    root = toy({})
    (root / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    commit(root)
    return root


def test_parameters_are_those_of_the_commit(home: Path) -> None:
    head = workspace.resolve(home, "HEAD")
    (home / "params.yaml").write_text("an edit\n")
    found = trials("ppo.kl.coef=0.05,0.1")
    made.read_params(home, head, found)
    assert [one.params["ppo"]["kl"]["coef"] for one in found] == [0.05, 0.1]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("ppo.kl.coef=-1", "betas/params.yaml: ppo.kl.coef: "),
        ("ppo.kl.koef=1", "betas/params.yaml: ppo.kl.koef: unknown parameter"),
        ("+ppo.koef=1", "betas/params.yaml: ppo.koef: unknown parameter"),
    ],
)
def test_a_value_that_params_refuse(home: Path, override: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        made.read_params(home, workspace.resolve(home, "HEAD"), trials(override))
    assert str(refused.value).startswith(says)
    assert "\n" not in str(refused.value)


def test_the_made_up_name() -> None:
    assert made.default_name(made.read_space(OVERRIDES, ()), "e70966d1234") == "coef-seed-e70966d"
    assert call(ROOT, "git", "check-ref-format", "refs/exps/ab/cd/coef-seed-e70966d") == ""
