"""The graph is dvc.yaml's, in the order in which DVC runs it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.graph import read_graph
from rlhf_core.errors import UserError
from tasks.stage.dvc_files import recorded_order

DIAMOND = {
    "first": ("work", []),
    "right": ("work", ["first"]),
    "left": ("work", ["first"]),
    "last": ("work", ["left", "right"]),
}


def test_order_is_that_of_the_file_where_the_file_is_in_order(toy: Callable[..., Path]) -> None:
    graph = read_graph(toy(DIAMOND))
    assert graph.stages == ("first", "right", "left", "last")
    assert graph.upstream == {"first": (), "right": ("first",), "left": ("first",), "last": ("left", "right")}


def test_order_is_that_of_dvc_repro_where_it_is_not(toy: Callable[..., Path], serial: Callable[[Path], None]) -> None:
    root = toy({name: DIAMOND[name] for name in ("last", "right", "first", "left")})
    graph = read_graph(root)
    assert all(
        graph.stages.index(need) < graph.stages.index(name) for name in graph.stages for need in graph.upstream[name]
    )
    serial(root)
    assert graph.stages == recorded_order(root)


def test_tracked_data_is_no_stage_but_a_source(toy: Callable[..., Path], tmp_path: Path) -> None:
    root = toy(DIAMOND)
    (root / "input.txt.dvc").write_text(
        "outs:\n- md5: b026324c6904b2a9cb4b88d6d61c81d1\n  size: 2\n  path: input.txt\n"
    )
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        graph = read_graph(root)
    finally:
        os.chdir(here)
    assert graph.stages == ("first", "right", "left", "last")
    assert graph.all_sources() == ("input.txt.dvc",)


def test_select_takes_what_a_stage_needs_and_no_more(toy: Callable[..., Path]) -> None:
    graph = read_graph(toy(DIAMOND))
    assert graph.select(["left"]).stages == ("first", "left")
    assert graph.select(None) == graph
    with pytest.raises(
        UserError, match=r"unknown stage lfet; did you mean left\?; dvc.yaml has: first, right, left, last"
    ):
        graph.select(["lfet"])


@pytest.mark.parametrize("text", ["stages: [", "stages:\n  a:\n    cdm: x\n"])
def test_an_unreadable_graph_is_a_users_error(toy: Callable[..., Path], text: str) -> None:
    root = toy({})
    (root / "dvc.yaml").write_text(text)
    with pytest.raises(UserError, match=r"^dvc\.yaml: ") as caught:
        read_graph(root)
    assert "\n" not in str(caught.value)
    assert str(root) not in str(caught.value)
