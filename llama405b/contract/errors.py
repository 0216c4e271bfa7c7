"""Errors that end a program with one sentence, and the exit codes that all programs share.

UserError            bad input: nothing was changed         exit 2
└── RunError         a host or the run is at fault          exit 1
"""

from collections.abc import Sized

GOOD, FAILED, REFUSED, UNFIT, STOPPED_FOLLOWING = 0, 1, 2, 3, 130


class UserError(Exception):
    """One sentence for the person at the terminal: where, what, and what to do."""

    exit_code = REFUSED


class RunError(UserError):
    """The input was good; a host, a rank or the run was not."""

    exit_code = FAILED


def code_for(faults: Sized | bool) -> int:
    """FAILED if there are any faults, else GOOD."""
    return FAILED if faults else GOOD
