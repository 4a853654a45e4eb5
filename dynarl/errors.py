"""What can go wrong for a user, one class per exit code. The text is the whole message: what, where, and what to do
next.
"""

from __future__ import annotations


class DynarlError(Exception):
    """Base of the errors that are shown without a traceback. `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigError(DynarlError):
    """A configuration that cannot be read or cannot work."""

    exit_code = 3


class SlurmError(DynarlError):
    """Slurm is missing, too old, unreachable, or said no."""

    exit_code = 4


class NotFoundError(DynarlError):
    """No such run, job or file."""

    exit_code = 5


class WaitTimeout(DynarlError):
    """Something waited for did not happen in time."""

    exit_code = 6
