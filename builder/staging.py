"""Directories that are written whole or not at all, and by one process at a time."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import BuildError, BusyError
from .manifest import is_engine


def check_output(output: Path, force: bool) -> None:
    """``output`` does not exist, or is empty, or is an engine directory and ``force`` is set.

    Raises:
        BuildError: it is something else.
    """
    if output.is_dir() and not any(output.iterdir()):
        return
    if is_engine(output):
        if not force:
            raise BuildError(f"{output} holds an engine already (use --force to replace it, or another directory)")
    elif output.is_dir():
        raise BuildError(f"{output} is not empty and not an engine (use another directory)")
    elif output.exists() or output.is_symlink():
        raise BuildError(f"{output} is not a directory (use another path)")


@contextlib.contextmanager
def staged(output: Path, force: bool) -> Iterator[Path]:
    """A directory beside ``output`` that takes its place when the block ends, and is gone if the block fails.

    It has one name for each output, so that a lock on it keeps out a second build, and the next build finds and removes
    what one that was killed has left.
    """
    made = [parent for parent in output.parents if not parent.exists()]  # innermost first
    staging = output.parent / f".{output.name}.building"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with _locked(staging, output):
            try:
                for left in staging.iterdir():
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                yield staging
                _take_place(staging, output, force)
            except BaseException:  # Ctrl-C too
                shutil.rmtree(staging, ignore_errors=True)
                raise
    except BaseException:
        for parent in made:
            with contextlib.suppress(OSError):  # another process may use it by now
                parent.rmdir()
        raise


@contextlib.contextmanager
def _locked(directory: Path, output: Path) -> Iterator[None]:
    """``directory``, made, and locked by this process until the block ends or the process does."""
    while True:
        directory.mkdir(exist_ok=True)
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError(
                    f"another process is building {output} (wait for it, or use another directory)"
                ) from None
            if not _names(directory, handle):
                continue  # its build has just ended, and renamed or removed it
            yield
            return
        finally:
            os.close(handle)


def _take_place(staging: Path, output: Path, force: bool) -> None:
    check_output(output, force)  # again: another process may have written there meanwhile
    if not is_engine(output):
        staging.rename(output)  # POSIX: onto nothing, or onto an empty directory
        return
    replaced = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    output.rename(replaced)
    try:
        staging.rename(output)
    except BaseException:
        replaced.rename(output)
        raise
    shutil.rmtree(replaced)


def _names(path: Path, handle: int) -> bool:
    """Whether ``path`` still leads to what ``handle`` is open on."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def reason(error: OSError, output: Path) -> str:
    """One line that says why ``output`` could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left for {output} (free some, or use another disk)"
    where = error.filename2 or error.filename or output
    return f"{where}: {error.strerror or error} (check the path and its permissions)"
