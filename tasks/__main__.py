"""`python -m tasks STAGE` runs one stage, as dvc.yaml does. Without torch: `tasks.stage.run` imports the stage's file
when it is needed."""

import sys

from tasks.stage.run import main

if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):  # what a terminal cannot show must not end a stage
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    main(sys.argv[1:])
