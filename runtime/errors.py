"""The runtime's own exceptions; the builder's are in ``ddtree.builder``."""


class RequestError(ValueError):
    """A request that this engine cannot serve. The message is one line: the value, the limit, the remedy."""


class QueueFullError(RequestError):
    """A request that could be served, but not now: as many as may wait do."""


class EngineError(RuntimeError):
    """An engine directory that cannot be opened or a pass that failed. The message is one line."""
