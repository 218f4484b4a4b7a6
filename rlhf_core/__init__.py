"""Nothing lives here but one setting that must precede the first import of torch.

OpenMP's threads spin while they wait for each other: where other processes want the cores, that made a training step
twelve times slower; not to spin at all made it half as slow again on idle cores. So they spin for some microseconds
and then sleep. It changes no result. A user's own OMP_WAIT_POLICY or GOMP_SPINCOUNT wins.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
