"""From checkpoints to an engine directory: ``build_engine`` makes one, ``Manifest`` says what it holds."""

from .build import build_engine
from .errors import BuildError
from .manifest import FORMAT_VERSION, Manifest, is_engine

__all__ = ["FORMAT_VERSION", "BuildError", "Manifest", "build_engine", "is_engine"]
