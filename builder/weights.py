"""Weight files of an engine directory: the checkpoint's own by hard link where the dtype agrees, else a converted copy.

A graph names a tensor by file, offset and length (ONNX external data). Tensors are asked for while the graphs are
placed and written afterwards, when the size of the copy's header is known.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .checkpoint import NUMPY_DTYPES, Checkpoint, StoredTensor
from .errors import BuildError

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all

SPELLING = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # dtype -> safetensors'
_EXPONENT_BITS = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
_ALIGNMENT = 64  # bytes; where the copy's data begin
_CHECKED_AT_ONCE = 1 << 22  # elements: an embedding has 10^9, and each check makes two temporaries of its size


@dataclass
class Weight:
    """A tensor as the graph refers to it. ``file`` and ``offset`` are set when the weights are written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: StoredTensor | np.ndarray
    file: str = ""
    offset: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape) * NUMPY_DTYPES[SPELLING[self.dtype]].itemsize


class Weights:
    """The tensors that the graphs take of one checkpoint, in the engine's dtype.

    Args:
        role: "target" or "draft"; the engine's weight files begin with it.
    """

    def __init__(self, role: str, checkpoint: Checkpoint, dtype: str):
        self.role, self.checkpoint, self.dtype = role, checkpoint, dtype
        self._weights: dict[str, Weight] = {}

    def take(self, name: str, *shape: int) -> Weight:
        """The checkpoint's tensor ``name``.

        Raises:
            BuildError: it is missing, of another shape, or of a dtype that is no plain float.
        """
        if name not in self._weights:
            stored = self.checkpoint.tensor(name, shape)
            if stored.dtype not in SPELLING.values():
                raise BuildError(
                    f"{stored.file}: {name} is {stored.dtype} (use the float16, bfloat16 or float32 checkpoint)"
                )
            self._weights[name] = Weight(name, self.dtype, shape, stored)
        return self._weights[name]

    def find(self, name: str, *shape: int) -> Weight | None:
        """As ``take``, or None where the checkpoint has no such tensor."""
        return self.take(name, *shape) if name in self.checkpoint.tensors else None

    def refuse_unused(self, ignored: str) -> None:
        """Check that every tensor of the checkpoint was taken: one that was not belongs to a model with more in it.

        Args:
            ignored: regular expression of the names that need not be taken.

        Raises:
            BuildError: a tensor was left.
        """
        for name, stored in self.checkpoint.tensors.items():
            if name not in self._weights and not re.search(ignored, name):
                raise BuildError(
                    f"{stored.file}: {name} has no place in the model that config.json describes "
                    "(the weights are of another architecture, or have more layers)"
                )

    def put(self, name: str, values: np.ndarray) -> Weight:
        """A tensor that the checkpoint lacks, such as a table of cosines. The name is kept from other tensors."""
        if name not in self._weights:
            self._weights[name] = Weight(
                name, self.dtype, values.shape, values.astype(NUMPY_DTYPES[SPELLING[self.dtype]])
            )
        return self._weights[name]

    def write(self, directory: Path, progress: Progress) -> list[str]:
        """Link or write every weight file, and set where each tensor lies.

        Returns:
            Notes for the user: which files had to be copied.

        Raises:
            BuildError: a weight is NaN or infinite, or too large for the dtype.
        """
        notes = []
        copied = []
        links: dict[Path, str] = {}
        total, done = sum(weight.size for weight in self._weights.values()), 0
        for weight in self._weights.values():
            source = weight.source
            if isinstance(source, np.ndarray) or source.dtype != SPELLING[self.dtype]:
                copied.append(weight)
                continue
            _check_finite(source, weight.name)
            if source.file not in links:
                links[source.file] = f"{self.role}-{source.file.name}"
                notes += _link(source.file, directory / links[source.file])
            weight.file, weight.offset = links[source.file], source.offset
            done += weight.size
            progress(f"checking the {self.role}'s weights", done, total)
        if copied:
            self._write_copy(directory, copied, lambda doing, size: progress(doing, done + size, total))
        return notes

    def _write_copy(self, directory: Path, weights: list[Weight], progress: Callable[[str, int], None]) -> None:
        doing = f"converting the {self.role}'s weights to {self.dtype}"
        path = directory / f"{self.role}.{self.dtype}.safetensors"
        write_safetensors(path, weights, lambda done: progress(doing, done))


def write_safetensors(path: Path, weights: list[Weight], progress: Callable[[int], None]) -> None:
    """Write ``weights`` into one file, each in its dtype, and set where it lies.

    Args:
        progress: called with the bytes written.

    Raises:
        BuildError: a weight is NaN or infinite, or too large for the dtype.
    """
    ends = np.cumsum([weight.size for weight in weights]).tolist()
    entries = {
        weight.name: {
            "dtype": SPELLING[weight.dtype],
            "shape": weight.shape,
            "data_offsets": [end - weight.size, end],
        }
        for weight, end in zip(weights, ends, strict=True)
    }
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little"))
        stream.write(header)
        for weight, end in zip(weights, ends, strict=True):
            weight.file, weight.offset = path.name, stream.tell()
            stream.write(_converted(weight).data)
            progress(end)


def _converted(weight: Weight) -> np.ndarray:
    """The weight's bytes in its dtype: uint8, flat."""
    source = weight.source
    if isinstance(source, np.ndarray):
        values = source
    else:
        _check_finite(source, weight.name)
        with np.errstate(over="ignore"):
            values = source.elements().astype(NUMPY_DTYPES[SPELLING[weight.dtype]])
        if not _finite(values, SPELLING[weight.dtype]):
            raise BuildError(
                f"{source.file}: {weight.name} has values beyond the range of {weight.dtype} (use bfloat16)"
            )
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _finite(values: np.ndarray, dtype: str) -> bool:
    exponent = np.array(_EXPONENT_BITS[dtype], np.uint32 if dtype == "F32" else np.uint16)
    bits = values.reshape(-1).view(exponent.dtype)
    parts = (bits[start : start + _CHECKED_AT_ONCE] for start in range(0, len(bits), _CHECKED_AT_ONCE))
    return not any(np.any((part & exponent) == exponent) for part in parts)  # all ones: NaN or infinity


def _check_finite(stored: StoredTensor, name: str) -> None:
    if not _finite(stored.elements(), stored.dtype):
        raise BuildError(f"{stored.file}: {name} holds NaN or infinity (the checkpoint is damaged; download it again)")


def _link(source: Path, link: Path) -> list[str]:
    try:
        os.link(source.resolve(), link)  # a Hugging Face cache holds symbolic links, which ONNX Runtime does not follow
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, link)
        return [f"{source} was copied: a hard link to it cannot be made from {link.parent.parent}"]
    return []
