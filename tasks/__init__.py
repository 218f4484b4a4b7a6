"""The stages of the pipeline. `python -m tasks.<stage>` imports this module first, and torch later."""

import sys

if sys.argv[:1] == ["-m"]:  # runpy replaces it when it has found the stage
    from tasks.stage.workers import limit_gpus

    limit_gpus(stage=sys.orig_argv[-len(sys.argv)].rpartition(".")[2])
