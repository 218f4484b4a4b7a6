"""The built-in demo world as a source of demonstrations."""

from rlhf_core.demo.world import DemoWorld
from tasks.datasets.sources.example import Example
from tasks.params.ingest import DemoParams


def read(params: DemoParams, seed: int) -> list[Example]:
    """Every prompt with its demonstrations; only the demonstrations share keeps them, and held-out rows the first."""
    world = DemoWorld(seed, params.domains, params.needs)
    return [
        Example("demo", number, False, [{"role": "user", "content": text}], world.demonstration(text, index))
        for number, text in enumerate(world.prompts(params.prompts), start=1)
        for index in range(params.demonstrations_per_prompt)
    ]
