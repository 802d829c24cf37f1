"""What the C library does with memory that is freed."""

import ctypes
import os
import sys

# Numbers of settings, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Has the process keep memory that is freed, for the next tensor of that size.

    glibc gives it back to the system, which clears each page before it lends it again. In training
    and in generation every step frees as much as the next one needs: on 2 cores of an AMD EPYC that
    took a fifth of a bfloat16 step of a small model and a quarter of a beam search. The process
    stays as large as it once was, which it would be at its next step.

    Returns:
        Whether it does now: not outside Linux, nor with another C library, nor where the user has
        chosen (`MALLOC_TRIM_THRESHOLD_` and the like, or another allocator by `LD_PRELOAD`).
    """
    if sys.platform != "linux" or any(name in os.environ for name in _USERS_OWN):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # 32 MiB is the size up to which glibc itself would come to use its heap; a thread's own heaps
    # take no more.
    return bool(mallopt and mallopt(_MMAP_THRESHOLD, 2**25) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
