"""The one exception for mistakes that a user can mend. Programming errors keep their own types and their traceback."""


class UserError(Exception):
    """Something the user can mend. The message is one line: what is wrong, where, and what to do. Exit code 2."""
