"""Exceptions for what a user can fix. Programming errors keep their own types and their traceback."""

from collections.abc import Iterable


class UserError(Exception):
    """Something the user can fix. The message: what is wrong, where, and what to do, in one line or a line for each
    problem. Exit code 2."""


class NonFiniteError(UserError):
    """A loss or gradient is NaN or infinite; no optimiser step was made with it. A retry would end in the same way."""


def needs_bitsandbytes(setting: str, otherwise: str) -> UserError:
    """The error of a setting for which an optional library is missing."""
    return UserError(f"{setting} needs bitsandbytes: pip install 'bitsandbytes>=0.50,<1', or set it to {otherwise}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the nearest of the known names, to append to an error; empty where none is near."""
    import difflib

    return "".join(f"; did you mean {nearest}?" for nearest in difflib.get_close_matches(name, list(known), n=1))


SHORT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
"""Parts of the messages of RuntimeErrors: CPU allocators (Linux, Windows), CUDA driver, cuBLAS, cuDNN, C++."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator of CPU or GPU failed; by name and message, because torch may not be imported."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SHORT_OF_MEMORY)
