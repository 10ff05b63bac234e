"""Errors a user can cause, each worded so that one line tells the way out."""


class UserError(ValueError):
    """A wrong input: names the field as typed, the value got, the range and the way out.

    The command line prints it as one line and exits with 2.
    """


class RunFailure(RuntimeError):
    """A run that had to stop: says what went wrong first and where the resumable checkpoint is.

    The command line prints it as one line and exits with 1.
    """


class NonFinite(ArithmeticError):
    """A reading that is nan or inf; `series` names the first one of the step, `where` may say more."""

    def __init__(self, series: str, value: float, where: str = "") -> None:
        super().__init__(f"{series} = {value}{where}")
        self.series = series
