"""`python -m tasks STAGE` runs one stage, as dvc.yaml does. Without torch: `tasks.stage.run` imports the stage's file
when it is needed."""

import sys

from tasks.stage.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
