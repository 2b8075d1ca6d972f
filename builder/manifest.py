"""The manifest of an engine directory, ``config.json``: what the runtime needs to know, and the files it counts on.

Reading it needs nothing but the standard library.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BuildError

FORMAT = "ddtree-engine"
FORMAT_VERSION = 2
MANIFEST_FILE = "config.json"


@dataclass(frozen=True)
class Limits:
    """What the engine was built for; a request beyond it is refused."""

    max_batch_size: int
    max_seq_len: int  # tokens of prompt and output
    max_tree_nodes: int  # the largest budget; the root is not counted


@dataclass(frozen=True)
class TargetInfo:
    """The model being served."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    window: int | None  # sliding window in tokens; None: every layer sees all of the cache
    sliding_mask: (
        bool  # some layers have the window, some not: a second mask input, sliding_attention_mask, for the former
    )
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


@dataclass(frozen=True)
class DraftInfo:
    """The drafter."""

    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    block_size: int  # rows of the block: the anchor token and the masks
    sample_from_anchor: bool  # whether the anchor's row is a candidate, too
    max_depth: int  # D, rows of draft_logits
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    vocab_size: int  # columns of draft_logits
    draft_to_target: str | None  # file with the target ids of the columns, int32 [vocab_size]; None: the same ids
    window: int | None
    sliding_mask: bool
    causal: bool  # in layers without window, a block row sees no later row of the block
    window_causal: bool  # the same in layers with the window


@dataclass(frozen=True)
class CompiledInfo:
    """What a TensorRT engine was compiled for. The graphs of ONNX Runtime have none of these bounds."""

    arch: str  # "sm_120"
    version_compatibility: str  # which versions of the library open it
    hardware_compatibility: str  # which GPUs run it
    verify: str  # "plugin": verify_tree and build_tree are inside the engines; "kernel": kernels launched behind them
    prefill_chunk: int  # the most rows of a slot in a prompt pass
    target_cache_length: int  # rows of a slot in each KV cache
    draft_cache_length: int | None  # None: no drafter


@dataclass(frozen=True)
class FileInfo:
    """A file by content."""

    name: str
    size: int  # bytes
    sha256: str

    @classmethod
    def of(cls, path: Path, name: str) -> "FileInfo":
        """Measure and hash ``path``."""
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return cls(name, path.stat().st_size, digest)


@dataclass(frozen=True)
class Manifest:
    """An engine directory's ``config.json``."""

    format_version: int
    engine: str
    dtype: str  # of weights, activations and caches
    limits: Limits
    target: TargetInfo
    draft: DraftInfo | None  # None: plain decoding only
    compiled: CompiledInfo | None  # None: graphs for ONNX Runtime
    tokenizer_files: tuple[str, ...]
    files: tuple[FileInfo, ...]  # the directory's, without the manifest
    sources: tuple[FileInfo, ...]  # the checkpoints' configs and weights: "target/model.safetensors", ...
    versions: dict[str, str]  # of ddtree and the libraries that built it
    notes: tuple[str, ...]  # what the person who built it should know

    @property
    def feature_width(self) -> int:
        """Columns of the context features: one hidden state for each of target_layer_ids; 0 without a drafter."""
        return len(self.draft.target_layer_ids) * self.target.hidden_size if self.draft else 0

    @classmethod
    def load(cls, directory: Path | str) -> "Manifest":
        """Read the manifest and check that every file is there with its size.

        Raises:
            BuildError: not an engine directory, of another format version, or with a missing or cut file.
        """
        directory = Path(directory)
        content = _read(directory)
        if content is None:
            raise BuildError(f"{directory} is not an engine directory (make one with ddtree build)")
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            newer = isinstance(version, int) and version > FORMAT_VERSION
            raise BuildError(
                f"{directory} has format version {version}, this ddtree reads {FORMAT_VERSION} "
                f"({'upgrade ddtree-trtllm, or ' if newer else ''}build the engine again)"
            )
        try:
            del content["format"]
            manifest = _decode(cls, content)
        except (TypeError, KeyError, ValueError) as error:
            raise BuildError(f"{directory}/{MANIFEST_FILE} is damaged: {error} (build the engine again)") from None
        for file in manifest.files:
            path = directory / file.name
            if not path.is_file():
                raise BuildError(f"{path} is missing (build the engine again)")
            if path.stat().st_size != file.size:
                raise BuildError(f"{path} has {path.stat().st_size} bytes, not {file.size} (build the engine again)")
        return manifest

    @classmethod
    def verify(cls, directory: Path | str) -> "Manifest":
        """As ``load``, and hash every file.

        Raises:
            BuildError: a file's content has changed since the build.
        """
        manifest = cls.load(directory)
        for file in manifest.files:
            path = Path(directory) / file.name
            found = FileInfo.of(path, file.name)
            if found != file:
                raise BuildError(
                    f"{path} has changed since the engine was built: its SHA-256 is {found.sha256[:16]}..., "
                    f"not {file.sha256[:16]}... (build the engine again)"
                )
        return manifest

    def save(self, directory: Path) -> None:
        """Write ``config.json`` into ``directory``."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        (directory / MANIFEST_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def is_engine(directory: Path | str) -> bool:
    """Whether ``directory`` holds an engine's manifest that is JSON, of whatever version and content."""
    return _read(Path(directory)) is not None


def _read(directory: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("format") == FORMAT else None


_NESTED: dict[str, Callable[[Any], Any]] = {
    "limits": lambda value: _decode(Limits, value),
    "target": lambda value: _decode(TargetInfo, value),
    "draft": lambda value: None if value is None else _decode(DraftInfo, value),
    "compiled": lambda value: None if value is None else _decode(CompiledInfo, value),
    "files": lambda value: [_decode(FileInfo, file) for file in value],
    "sources": lambda value: [_decode(FileInfo, file) for file in value],
}


def _decode(cls: type, content: Any) -> Any:
    """The dataclass ``cls`` from its JSON object; JSON's lists become tuples."""
    if not isinstance(content, dict):
        raise TypeError(f"{cls.__name__} is {content!r}")
    values = {key: _NESTED.get(key, lambda value: value)(value) for key, value in content.items()}
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
