"""Exceptions for what a user can mend. Programming errors keep their own types and their traceback."""


class UserError(Exception):
    """Something the user can mend. The message is one line: what is wrong, where, and what to do. Exit code 2."""


class NonFiniteError(UserError):
    """A loss or gradient is NaN or infinite; no optimiser step was made with it. The same parameters end here again."""
