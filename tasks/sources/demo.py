"""The built-in demo world as a source of demonstrations. The world itself, its topics and its hidden rubric, live in
`rlhf_core/demo/`."""

from rlhf_core.demo.world import DemoWorld
from tasks.params.ingest import DemoParams
from tasks.sources.example import Example


def read(params: DemoParams, seed: int) -> list[Example]:
    """Every prompt of the world with one demonstration; only the demonstrations share and the held-out rows keep it."""
    world = DemoWorld(seed, params.domains)
    return [
        Example("demo", number, False, [{"role": "user", "content": text}], world.demonstration(text, 0))
        for number, text in enumerate(world.prompts(params.prompts), start=1)
    ]
