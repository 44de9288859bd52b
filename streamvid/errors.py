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


def raised_by_us(error: BaseException) -> bool:
    """Whether the statement that raised it is in this package: a ValueError from there is a mistake of the user's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("streamvid")
