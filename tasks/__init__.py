"""The stages of the pipeline. `python -m tasks.<stage>` imports this module first, and torch later."""

import sys

if sys.argv[:1] == ["-m"]:  # runpy replaces it when it has found the stage
    from tasks.stage.gpus import claim_gpus

    claim_gpus(module=sys.orig_argv[-len(sys.argv)])
