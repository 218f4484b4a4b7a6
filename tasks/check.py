"""Stage `check`: validates params.yaml before DVC removes any output. It writes a constant, on which all other stages
depend, and the blocks that params.yaml may lack, those of the methods and `round`: DVC tracks them there."""

from rlhf_core.config.block import Block
from tasks.params.all import Params
from tasks.params.loader import parse, read_yaml
from tasks.params.methods import METHODS
from tasks.stage.run import run
from tasks.stage.stage import Stage

CONSTANT = "data/check.ok"
METHOD_BLOCKS = "data/methods.json"


def execute(stage: Stage[Block]) -> None:
    """Raise UserError for the first problem of params.yaml."""
    content = read_yaml()
    parse(Params, content)
    blocks = ["round", *(method.name for method in METHODS)]
    stage.outputs.write_json(METHOD_BLOCKS, {name: content[name] for name in blocks})
    stage.out(CONSTANT).write_text("params.yaml is valid\n", encoding="utf-8")


if __name__ == "__main__":
    run("check", Block, execute, tracked=False)
