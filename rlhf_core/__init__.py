"""Nothing lives here but two settings of the process that must precede the first import of torch. Neither changes a
result; docs/performance.md says what each gave.

OpenMP's threads spin while they wait for each other: where other processes want the cores, that made a training step
twelve times slower; not to spin at all made it half as slow again on idle cores. So they spin for some microseconds
and then sleep. A user's own OMP_WAIT_POLICY or GOMP_SPINCOUNT wins.

The C library gives the memory of large tensors back to the system when they are freed, and each new one then costs a
page fault per 4 KiB. Here it is kept for the next tensor. A user's own MALLOC_ settings win.
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
