"""The builder's exceptions."""


class BuildError(ValueError):
    """A checkpoint, setting or engine directory that cannot be used.

    The message is one line: the thing and its value, the limit, the remedy.
    """


class BusyError(BuildError):
    """Another process is building into the same directory right now."""
