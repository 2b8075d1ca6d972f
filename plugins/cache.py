"""Where this project keeps what it can make again: compiled kernels, and engines built on first use."""

import os
from pathlib import Path


def cache_root() -> Path:
    """$DDTREE_CACHE, or ddtree in $XDG_CACHE_HOME or ~/.cache. It need not exist yet."""
    if path := os.environ.get("DDTREE_CACHE"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddtree"
