"""Two settings of the process, made before torch is imported. They change speed only; a user's own environment
variables (OMP_WAIT_POLICY, GOMP_SPINCOUNT, MALLOC_*) have priority.

Waiting OpenMP threads spin briefly and then sleep: endless spinning slows down other processes, no spinning slows down
torch. Memory of freed tensors is kept for new ones, which saves a page fault per 4 KiB.
"""

import ctypes
import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if not any(name.startswith("MALLOC_") for name in os.environ) and hasattr(ctypes.CDLL(None), "mallopt"):
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**25)  # glibc's maximum
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
