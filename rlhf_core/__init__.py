"""Two settings of the process, made before the first import of torch. Neither changes a result.

OpenMP's threads spin while they wait for each other: beside other busy processes that made a training step twelve
times slower; without any spinning it took half as long again on idle cores. So they spin for some microseconds and
then sleep. A user's own OMP_WAIT_POLICY or GOMP_SPINCOUNT has priority.

The C library returns the memory of freed large tensors to the system, and each new tensor then costs a page fault per
4 KiB. Here the memory is kept for the next tensor. A user's own MALLOC_ settings have priority.
"""

import ctypes
import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if not any(name.startswith("MALLOC_") for name in os.environ) and hasattr(ctypes.CDLL(None), "mallopt"):
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**25)  # the largest that glibc takes
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
