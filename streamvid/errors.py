"""The errors a user can cause. Each message says what was wrong, what is allowed, and what to do.

The command line prints the message on one line and exits with 2; the Python API raises the class.
"""


class StreamvidError(ValueError):
    """A mistake in what the user asked for. A ValueError, so that plain Python callers can catch it as one."""


class CheckpointError(StreamvidError):
    """A file is not a checkpoint we read, is damaged, or does not fit the model."""


class MemoryBudgetError(StreamvidError):
    """A memory plan does not fit its budget; the message carries the numbers."""


class ProfileError(StreamvidError):
    """A head profile or calibration file was made for another model."""
