"""The builder's one exception."""


class BuildError(ValueError):
    """A checkpoint, setting or engine directory that cannot be used.

    The message is one line: the thing and its value, the limit, the remedy.
    """
