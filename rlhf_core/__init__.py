"""Settings of the process, made before torch is imported. They change no result; a user's own environment variables
(OMP_WAIT_POLICY, GOMP_SPINCOUNT, MALLOC_*) have priority.

Waiting OpenMP threads spin briefly and then sleep: endless spinning slows down other processes, no spinning slows down
torch. Memory of freed tensors is kept for new ones, which saves a page fault per 4 KiB. peft imports bitsandbytes where
it is installed, which would warn in every process about a kernel for CPUs that is missing.
"""

import ctypes
import logging
import os

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if not any(name.startswith("MALLOC_") for name in os.environ) and hasattr(ctypes.CDLL(None), "mallopt"):
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**25)  # glibc's maximum
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
