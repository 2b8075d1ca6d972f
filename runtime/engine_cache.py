"""Engines built on first use and kept: the demo pair's, and those of checkpoints given instead of an engine."""

import hashlib
import shutil
import time
from importlib.metadata import version
from pathlib import Path

from ddtree.builder import FORMAT_VERSION, BuildError, Manifest, build_engine
from ddtree.builder.build import MAX_TREE_NODES
from ddtree.builder.errors import BusyError
from ddtree.demo import DRAFT_DIR, TARGET_DIR
from ddtree.plugins.cache import cache_root

_POLL_SECONDS = 0.1


def demo_pair() -> tuple[Path, Path]:
    """The target and draft checkpoints that come with the package."""
    return TARGET_DIR, DRAFT_DIR


def cached_engine(target: Path, draft: Path | None) -> Path:
    """The ONNX Runtime engine of these checkpoints, built now if the cache has none of this content.

    The cache is ``cache_root()``.
    """
    directory = cache_root() / _key(target, draft)
    if _opens(directory):
        return directory
    shutil.rmtree(directory, ignore_errors=True)  # damaged
    try:
        while not _built(target, draft, directory):
            time.sleep(_POLL_SECONDS)  # another process is building it
    except BuildError as error:
        if _opens(directory):  # another process has built it meanwhile
            return directory
        if isinstance(error.__cause__, OSError):
            raise BuildError(
                f"{error}; engines are kept in {directory.parent}, DDTREE_CACHE names another place"
            ) from None
        raise
    return directory


def _built(target: Path, draft: Path | None, directory: Path) -> bool:
    """Build the engine; False if another process is at it."""
    try:
        build_engine(target, draft, directory, max_tree_nodes=MAX_TREE_NODES)
    except BusyError:
        return False
    return True


def _opens(directory: Path) -> bool:
    try:
        Manifest.load(directory)
    except BuildError:
        return False
    return True


def _key(target: Path, draft: Path | None) -> str:
    """A name for these files as they are now: any change of size or time makes another engine, and so does another
    version of the package."""
    digest = hashlib.sha256(f"{FORMAT_VERSION} {version('ddtree-trtllm')}".encode())
    for role, directory in (("target", target), ("draft", draft)):
        digest.update(f"{role} {'none' if directory is None else 'given'}\n".encode())  # given, but missing: not none
        for file in sorted(directory.iterdir()) if directory and directory.is_dir() else []:
            stat = file.stat()
            digest.update(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
