"""Nothing lives here but one setting that must precede the first import of torch.

OpenMP's threads spin while they wait for each other; where other processes want the cores, that made a training step
twelve times slower. Waiting passively changes no result. A user's own OMP_WAIT_POLICY wins.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
