"""TensorRT-LLM checkpoints of a target and its drafter: what ``trtllm-build`` reads.

    OUTPUT/target/  config.json  rank0.safetensors
    OUTPUT/draft/   config.json  rank0.safetensors  draft_to_target.npy (of a reduced draft vocabulary)
    OUTPUT/         tokenizer.json, ...

A config.json is TensorRT-LLM's, with one key more, "ddtree", which TensorRT-LLM carries into the config.json of the
engine: the models' own configurations, and what they were made of. The tensors keep the names of the Hugging Face
checkpoints, which are those of ``trtllm_models``; the drafter's have the target's embedding and head among them.
"""

import dataclasses
import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .build import DRAFT_TO_TARGET, TOKENIZER, TOKENIZER_FILES, describe_draft, describe_target
from .checkpoint import Checkpoint, read_header
from .config import DraftConfig, TargetConfig
from .draft import draft_to_target, place_draft
from .errors import BuildError
from .graph import Graph
from .manifest import CompiledInfo, DraftInfo, FileInfo, Limits, TargetInfo
from .staging import check_output, reason, staged
from .target import place_target
from .weights import SPELLING, Progress, Weight, Weights, write_safetensors

SECTION_VERSION = 1
ROLES = {"target": "DDTreeTarget", "draft": "DDTreeDraft"}  # -> the class in trtllm_models, and its architecture
DTYPES = ("bfloat16", "float16")
MODEL_FILE = Path(__file__).with_name("trtllm_models.py")
WEIGHTS = "rank0.safetensors"
MAX_TREE_NODES = 1023  # what the plugins take
_BATCH_SIZE, _SEQUENCE_LENGTH = 8, 4096  # what the printed commands say; trtllm-build's own batch size is 2048


def convert_checkpoints(
    target: Path,
    draft: Path | None,
    output: Path,
    *,
    dtype: str | None = None,
    max_tree_nodes: int = 255,
    progress: Progress,
) -> list[str]:
    """Write TensorRT-LLM checkpoints of a target and its drafter into the directory ``output``, whole or not at all.

    Args:
        target, draft: Hugging Face directories; no draft: for plain decoding.
        output: must not exist, or be empty.
        dtype: "bfloat16" or "float16"; None: that of most of the target's bytes, else bfloat16.
        max_tree_nodes: the largest budget, root excluded; trtllm-build knows it as --max_draft_len.
        progress: called with what is being done, bytes done, bytes in all.

    Returns:
        The roles that there is a checkpoint of.

    Raises:
        BuildError: a setting, a checkpoint or ``output`` cannot be used.
        BusyError: another process writes ``output``.
    """
    if dtype is not None and dtype not in DTYPES:
        raise BuildError(f"dtype {dtype!r} does not go with TensorRT-LLM (use {', '.join(DTYPES)})")
    if not 1 <= max_tree_nodes <= MAX_TREE_NODES:
        raise BuildError(f"max_tree_nodes {max_tree_nodes} is out of range (use 1 to {MAX_TREE_NODES})")
    output = Path(output).absolute()
    check_output(output, force=False)
    try:
        checkpoints = {"target": Checkpoint.open(Path(target), "target")}
        config = TargetConfig.read(checkpoints["target"])
        dtype = dtype or _default_dtype(checkpoints["target"])
        weights = Weights("target", checkpoints["target"], dtype)
        if not (checkpoints["target"].directory / TOKENIZER).is_file():
            raise BuildError(
                f"target checkpoint {target} has no {TOKENIZER} "
                "(write one: load it with transformers' AutoTokenizer and save_pretrained it)"
            )
        drafter, table = None, None
        if draft is not None:
            checkpoints["draft"] = Checkpoint.open(Path(draft), "draft")
            drafter = DraftConfig.read(checkpoints["draft"], config)
            table = draft_to_target(drafter, checkpoints["draft"])
        # Placing a graph takes its tensors, and refuses what does not fit; lengths do not matter to that.
        feature_layers = drafter.target_layer_ids if drafter else ()
        graphs = {"target": place_target(config, weights, feature_layers, positions=1, cache_length=1)}
        if drafter:
            draft_weights = Weights("draft", checkpoints["draft"], dtype)
            graphs["draft"] = place_draft(drafter, draft_weights, config, weights, positions=1, cache_length=1)
        with staged(output, force=False) as directory:
            for role, graph in graphs.items():
                (directory / role).mkdir()
                _write_weights(directory / role / WEIGHTS, role, graph, progress)
            if table is not None:
                np.save(directory / "draft" / DRAFT_TO_TARGET, table)
            section = {
                "version": SECTION_VERSION,
                "configs": {role: checkpoint.config for role, checkpoint in checkpoints.items()},
                "generation_config": checkpoints["target"].generation_config,
                "sources": [
                    dataclasses.asdict(FileInfo.of(file, f"{role}/{file.name}"))
                    for role, checkpoint in checkpoints.items()
                    for file in (checkpoint.directory / "config.json", *checkpoint.files)
                ],
            }
            for role in graphs:
                content = _trtllm_config(role, config, drafter, dtype, max_tree_nodes) | {"ddtree": section}
                (directory / role / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            for name in TOKENIZER_FILES:
                if (checkpoints["target"].directory / name).is_file():
                    shutil.copyfile(checkpoints["target"].directory / name, directory / name)
    except OSError as error:
        raise BuildError(reason(error, output)) from error
    return list(graphs)


def build_commands(directory: Path) -> list[str]:
    """The commands that make engines of what ``convert_checkpoints`` wrote into ``directory``: shell lines."""
    commands = []
    for role, model in ROLES.items():
        if not (directory / role).is_dir():
            continue
        config = json.loads((directory / role / "config.json").read_text(encoding="utf-8"))
        options = {
            "checkpoint_dir": directory / role,
            "output_dir": engine_directory(directory, role),
            "model_cls_file": MODEL_FILE,
            "model_cls_name": model,
            "max_batch_size": _BATCH_SIZE,
            "max_seq_len": min(config["max_position_embeddings"], _SEQUENCE_LENGTH),
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        commands.append(shlex.join(["trtllm-build", *arguments]))
    return commands


def engine_directory(directory: Path, role: str) -> Path:
    """Where trtllm-build is told to write the engine of the checkpoint ``directory/role``."""
    return directory / f"{role}-engine"


@dataclass(frozen=True)
class TrtllmCheckpoint:
    """A checkpoint of ours, opened to build an engine of it."""

    role: str  # "target" or "draft"
    checkpoint: Checkpoint  # of the tensors that this role's graph takes
    dtype: str
    target: TargetConfig
    draft: DraftConfig | None

    @classmethod
    def open(cls, directory: Path, role: str, dtype: str, section: dict[str, Any]) -> "TrtllmCheckpoint":
        """Read what ``convert_checkpoints`` wrote into ``directory``.

        Args:
            section: "ddtree" of its config.json.

        Raises:
            BuildError: it is of another version, or has no weights.
        """
        target, draft = read_configs(directory, section)
        if not (directory / WEIGHTS).is_file():
            raise BuildError(f"{directory} has no {WEIGHTS} (run ddtree convert again)")
        checkpoint = Checkpoint(directory, {}, {}, read_header(directory / WEIGHTS))
        return cls(role, checkpoint, dtype, target, draft)

    @property
    def target_info(self) -> TargetInfo:
        return describe_target(self.target)

    @property
    def draft_info(self) -> DraftInfo | None:
        return describe_draft(self.draft) if self.draft else None

    @property
    def draft_to_target(self) -> np.ndarray | None:
        """Target ids of a reduced draft vocabulary, int32 [draft_vocab]; None where the ids are the target's."""
        path = self.checkpoint.directory / DRAFT_TO_TARGET
        return np.load(path) if path.is_file() else None

    def check_length(self, max_seq_len: int) -> None:
        """Refuse sequences that are longer than the models take."""
        models = {"target": self.target.decoder} | ({"draft": self.draft.decoder} if self.draft else {})
        for role, model in models.items():
            if max_seq_len > model.max_position_embeddings:
                raise BuildError(
                    f"max_seq_len {max_seq_len} exceeds the {role}'s max_position_embeddings "
                    f"{model.max_position_embeddings} (use --max_seq_len {model.max_position_embeddings} or less)"
                )

    def place(self, limits: Limits, info: CompiledInfo) -> tuple[Graph, Weights]:
        """This role's graph, and its weights, which are still to be written."""
        weights = Weights(self.role, self.checkpoint, self.dtype)
        block = self.draft.block_size if self.draft else 0
        positions = limits.max_seq_len + block + 1  # the drafter's block reaches past the last token
        if self.role == "target":
            layers = self.draft.target_layer_ids if self.draft else ()
            return place_target(self.target, weights, layers, positions, info.target_cache_length), weights
        assert self.draft is not None
        return place_draft(self.draft, weights, self.target, weights, positions, info.draft_cache_length), weights


def read_configs(directory: Path, section: dict[str, Any]) -> tuple[TargetConfig, DraftConfig | None]:
    """The models that "ddtree" of ``directory``'s config.json describes.

    Raises:
        BuildError: it is of another version.
    """
    if section.get("version") != SECTION_VERSION:
        raise BuildError(
            f"{directory} has checkpoint version {section.get('version')}, this ddtree reads {SECTION_VERSION} "
            "(run ddtree convert again)"
        )
    configs, generation = section["configs"], section["generation_config"]
    target = TargetConfig.read(Checkpoint(directory, configs["target"], generation, {}))
    if "draft" not in configs:
        return target, None
    return target, DraftConfig.read(Checkpoint(directory, configs["draft"], {}, {}), target)


def _default_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of most of the checkpoint's bytes if TensorRT-LLM takes it, else the first that it takes."""

    def stored(dtype: str) -> int:
        return sum(tensor.size for tensor in checkpoint.tensors.values() if tensor.dtype == SPELLING[dtype])

    return max(DTYPES, key=stored)


def _write_weights(path: Path, role: str, graph: Graph, progress: Progress) -> None:
    weights: list[Weight] = [
        weight
        for weight in graph.weights.values()
        if not isinstance(weight.source, np.ndarray)  # rotary tables: their length is the engine's
    ]
    total = sum(weight.size for weight in weights)
    write_safetensors(path, weights, lambda done: progress(f"writing the {role}'s weights", done, total))


def _trtllm_config(
    role: str, target: TargetConfig, draft: DraftConfig | None, dtype: str, max_tree_nodes: int
) -> dict[str, Any]:
    """What TensorRT-LLM's PretrainedConfig takes."""
    model = draft.decoder if role == "draft" and draft else target.decoder
    models = [target.decoder] + ([draft.decoder] if draft else [])
    return {
        "architecture": ROLES[role],
        "dtype": dtype,
        "logits_dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_size": model.head_dim,
        "qk_layernorm": model.qk_norm,
        "hidden_act": "silu",
        "norm_epsilon": model.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": min(each.max_position_embeddings for each in models),
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "max_draft_len": max_tree_nodes,
    }
