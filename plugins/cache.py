"""Where this project keeps what it can make again: compiled kernels, and engines built on first use."""

import os
from errno import ENOENT
from pathlib import Path


def cache_root() -> Path:
    """$DDTREE_CACHE, or ddtree in $XDG_CACHE_HOME or ~/.cache. It need not exist yet.

    Raises:
        FileNotFoundError: neither is set, and the user has no home directory.
    """
    if path := os.environ.get("DDTREE_CACHE"):
        return Path(path)
    if path := os.environ.get("XDG_CACHE_HOME"):
        return Path(path) / "ddtree"
    try:
        return Path.home() / ".cache" / "ddtree"
    except RuntimeError as error:  # as Python says it
        raise FileNotFoundError(ENOENT, "no home directory to keep a cache in: set DDTREE_CACHE") from error
