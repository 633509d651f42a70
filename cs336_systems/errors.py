"""The one exception that command lines turn into a single line and exit code 2."""


class UserError(ValueError):
    """Something the user can put right: what is wrong, with the numbers, and what to do, in one line.

    Anything else that is raised is a defect of ours and keeps its traceback.
    """
