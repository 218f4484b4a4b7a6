"""Stage `report`: a self-contained page with the pictures, tables and samples of the run, and the pictures as PNG."""

from tasks.page.figures import draw
from tasks.page.inputs import read_run
from tasks.page.page import render, write_page
from tasks.params.report import ReportParams
from tasks.stage.stage import Stage

SAMPLES = "data/evaluate/samples.jsonl"
ANSWERS = "data/evaluate/answers.jsonl"


def execute(stage: Stage[ReportParams]) -> None:
    """Write report/index.html and report/<picture>.png."""
    inputs = read_run(stage.read(SAMPLES), stage.read(ANSWERS), stage.root)
    pictures = draw(inputs)
    folder = stage.out("report")
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        (folder / f"{picture.name}.png").write_bytes(picture.png)
    write_page(render(inputs, pictures, stage.params.samples, stage.hashes), folder / "index.html")
