"""Stage `check`: validates the whole of params.yaml before DVC removes any output, and writes a constant that every
other stage depends on."""

from rlhf_core.config.block import Block
from tasks.params.all import Params
from tasks.params.loader import parse, read_yaml
from tasks.stage.run import run
from tasks.stage.stage import Stage

CONSTANT = "data/check.ok"


def execute(stage: Stage[Block]) -> None:
    """Raise UserError for the first problem of params.yaml."""
    parse(Params, read_yaml())
    stage.out(CONSTANT).write_text("params.yaml is valid\n", encoding="utf-8")


if __name__ == "__main__":
    run("check", Block, execute, tracked=False)
