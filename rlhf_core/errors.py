"""Exceptions for what a user can fix. Programming errors keep their own types and their traceback."""


class UserError(Exception):
    """Something the user can fix. The message is one line: what is wrong, where, and what to do. Exit code 2."""


class NonFiniteError(UserError):
    """A loss or gradient is NaN or infinite; no optimiser step was made with it. The same parameters end here again."""


SHORT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
"""Words of allocators in a RuntimeError: the CPU's on Linux and on Windows, the driver's, cuBLAS, cuDNN, C++."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's or the CPU's allocator failed, by name and text, since torch need not be loaded."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SHORT_OF_MEMORY)
