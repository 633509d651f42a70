"""The one exception that command lines turn into a single line and exit code 2."""


class UserError(ValueError):
    """A mistake that the user can correct: what is wrong, with the numbers, and what to do, in one line.

    Any other exception is a defect of this library and keeps its traceback.
    """
