"""A Hugging Face checkpoint directory: its JSON files and the tensors of its safetensors files."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .errors import BuildError

NUMPY_DTYPES: dict[str, np.dtype] = {
    spelling: np.dtype(dtype)
    for spelling, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
_HEADER_LIMIT = 100_000_000  # bytes; the safetensors library refuses longer headers too


@dataclass(frozen=True)
class StoredTensor:
    """Where a checkpoint keeps a tensor: ``size`` bytes from ``offset`` in ``file``, row-major."""

    file: Path
    dtype: str  # as safetensors spells it: "F32", "BF16", ...
    shape: tuple[int, ...]
    offset: int
    size: int

    def elements(self) -> np.ndarray:
        """The elements, flat, mapped from the file."""
        raw = np.memmap(self.file, np.uint8, mode="r", offset=self.offset, shape=(self.size,))
        return raw.view(NUMPY_DTYPES[self.dtype])


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory that has been looked through: no weight has been read yet.

    Raises:
        BuildError: a file is missing, truncated or not what its name says.
    """

    directory: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, directory: Path, role: str) -> "Checkpoint":
        """Read the JSON files and the safetensors headers of ``directory``; ``role`` names it in errors."""
        if not directory.is_dir():
            raise BuildError(f"{role} checkpoint {directory} is not a directory (give a Hugging Face model directory)")
        if not (directory / "config.json").is_file():
            raise BuildError(f"{role} checkpoint {directory} has no config.json (give a Hugging Face model directory)")
        if (directory / "hf_quant_config.json").is_file():  # NVIDIA ModelOpt's, which leaves config.json as it was
            raise BuildError(
                f"{role} checkpoint {directory} is quantized (hf_quant_config.json), and the graphs multiply plain "
                "floats only (use the float16, bfloat16 or float32 checkpoint)"
            )
        generation = directory / "generation_config.json"
        return cls(
            directory=directory,
            config=_read_json(directory / "config.json"),
            generation_config=_read_json(generation) if generation.is_file() else {},
            tensors=_read_index(directory, role),
        )

    @property
    def files(self) -> list[Path]:
        """The weight files, each once."""
        return sorted({tensor.file for tensor in self.tensors.values()})

    def tensor(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor ``name``, which must have ``shape``."""
        stored = self.tensors.get(name)
        if stored is None:
            raise BuildError(
                f"{self.directory} has no tensor {name} (the weights are incomplete, or do not belong to config.json)"
            )
        if stored.shape != shape:
            raise BuildError(
                f"{stored.file}: {name} has shape {list(stored.shape)}, but config.json asks for {list(shape)} "
                "(the weights do not belong to this config.json)"
            )
        return stored


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # includes UnicodeDecodeError
        raise BuildError(f"{path} is not valid JSON: {error} (download the file again)") from None
    if not isinstance(content, dict):
        raise BuildError(f"{path} holds a JSON {type(content).__name__}, not an object (download the file again)")
    return content


def _read_index(directory: Path, role: str) -> dict[str, StoredTensor]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.is_file():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise BuildError(f"{index} has no weight_map of file names (download the file again)")
        files = sorted({directory / shard for shard in shards.values()})
    elif single.is_file():
        files = [single]
    elif any(directory.glob("pytorch_model*.bin")):
        raise BuildError(
            f"{role} checkpoint {directory} holds pickled weights only (convert them: load the model with transformers "
            "and save_pretrained it)"
        )
    else:
        raise BuildError(f"{role} checkpoint {directory} has no model.safetensors (download the weights)")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        if not file.is_file():
            raise BuildError(f"{index} names {file.name}, which is missing (download that file)")
        tensors |= read_header(file)
    return tensors


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name.

    Raises:
        BuildError: it is truncated or no safetensors file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise BuildError(f"{file} is truncated or not a safetensors file: {size} bytes (download it again)")
        header = stream.read(length)
    try:
        entries = json.loads(header)
        tensors = {name: _stored_tensor(file, 8 + length, e) for name, e in entries.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BuildError(f"{file} has a damaged safetensors header: {error!r} (download it again)") from None
    for name, tensor in tensors.items():
        if tensor.offset + tensor.size > size:
            raise BuildError(
                f"{file} is truncated: {name} ends at byte {tensor.offset + tensor.size} of {size} (download it again)"
            )
    return tensors


def _stored_tensor(file: Path, data_start: int, entry: dict[str, Any]) -> StoredTensor:
    start, end = (int(offset) for offset in entry["data_offsets"])
    shape, dtype = tuple(int(dim) for dim in entry["shape"]), str(entry["dtype"])
    size = end - start
    # A dtype that is not in the table, such as F4, packs several elements into a byte: no graph takes it.
    if start < 0 or (dtype in NUMPY_DTYPES and size != math.prod(shape) * NUMPY_DTYPES[dtype].itemsize):
        raise ValueError(f"{size} bytes for {dtype} {list(shape)}")
    return StoredTensor(file, dtype, shape, data_start + start, size)
