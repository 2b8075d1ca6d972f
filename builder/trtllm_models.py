"""The models for ``trtllm-build --model_cls_file FILE --model_cls_name DDTreeTarget|DDTreeDraft`` of TensorRT-LLM 1.2.

``trtllm-build`` loads this file before it reads the checkpoint. Loading it makes the two architectures known. A model
takes a checkpoint of ``ddtree convert`` and has TensorRT's ONNX parser fill the network with the graph that every other
engine is made of, in the operators that TensorRT 10.14 has (``trtllm_graph``); it adds the tree operations, which are
plugins. The engine runs under ddtree's runtime, not under TensorRT-LLM's C++ executor.
"""

import dataclasses
import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import tensorrt as trt
import tensorrt_llm
from tensorrt_llm._common import default_net, default_trtnet
from tensorrt_llm.functional import DimRange, Tensor, constant
from tensorrt_llm.logger import logger
from tensorrt_llm.models import MODEL_MAP
from tensorrt_llm.models.modeling_utils import PretrainedConfig, PretrainedModel

from ddtree.builder.compile import Profile
from ddtree.builder.errors import BuildError
from ddtree.builder.graph import Graph
from ddtree.builder.manifest import CompiledInfo, Limits
from ddtree.builder.plans import compiled_info, draft_profiles, target_profiles
from ddtree.builder.tree_plugins import DIMENSIONS
from ddtree.builder.trtllm_checkpoint import MAX_TREE_NODES, ROLES, TrtllmCheckpoint
from ddtree.builder.trtllm_graph import lower
from ddtree.plugins import launch
from ddtree.plugins import trtllm as tree_operations
from ddtree.plugins.operations import BUILD_TREE, VERIFY_TREE, TensorSpec

if not tensorrt_llm.__version__.startswith("1.2."):
    raise BuildError(
        f"TensorRT-LLM {tensorrt_llm.__version__} is not supported (use 1.2.1, or ddtree build --engine tensorrt)"
    )

_MOST_ELEMENTS = 2**31 - 1  # of a tensor in TensorRT
# Options of trtllm-build that would have to change the network, with the values at which they do not.
_WITHOUT_EFFECT = {
    "use_cache": (True, "kv_cache_type disabled"),
    "max_beam_width": (1, "max_beam_width"),
    "prompt_embedding_table_size": (0, "max_prompt_embedding_table_size"),
    "speculative_decoding_draft_tokens_external": (False, "speculative_decoding_mode"),
    "spec_decoding_is_generation_length_variable": (False, "speculative_decoding_mode"),
    "gather_context_logits": (False, "gather_context_logits"),
}


class _DDTreeModel(PretrainedModel):
    """What target and drafter have in common. The weights are no Parameters: the parser reads them from the checkpoint.

    ``trtllm-build`` calls, in this order, ``from_checkpoint``, ``prepare_inputs``, and the model with its result.
    """

    role: str

    @classmethod
    def from_checkpoint(
        cls,
        ckpt_dir: str,
        rank: int | None = None,
        config: PretrainedConfig | None = None,
        *,
        preprocess_weights_hook: Any = None,
    ) -> "_DDTreeModel":
        """Open the checkpoint. The weights are not read yet.

        Raises:
            BuildError: it is of another class, for several GPUs, or of another version.
        """
        if config is None:
            config = PretrainedConfig.from_json_file(os.path.join(ckpt_dir, "config.json"))
        if config.mapping.world_size != 1 or rank not in (None, 0):
            raise BuildError(f"{ckpt_dir}: world_size {config.mapping.world_size} is not supported (one GPU only)")
        if config.architecture != ROLES[cls.role]:
            raise BuildError(
                f"{ckpt_dir} is a checkpoint of {config.architecture} "
                f"(use --model_cls_name {config.architecture}, or the {cls.role}'s checkpoint)"
            )
        model = cls(config)
        model.source = TrtllmCheckpoint.open(Path(ckpt_dir), cls.role, config.dtype, config.ddtree)
        return model

    def prepare_inputs(self, max_batch_size: int, max_seq_len: int, max_draft_len: int, **settings: Any) -> dict:
        """The limits of the engine, for ``forward``, which makes the inputs.

        Args:
            max_draft_len: the largest budget, root excluded.

        Raises:
            BuildError: a limit or an option of trtllm-build cannot be had.
        """
        for name, (neutral, option) in _WITHOUT_EFFECT.items():
            if settings.get(name, neutral) != neutral:
                raise BuildError(f"--{option} is not supported by ddtree's models (leave it out)")
        if not 1 <= max_draft_len <= MAX_TREE_NODES:
            raise BuildError(
                f"max_draft_len {max_draft_len} is out of range (use --max_draft_len 1 to {MAX_TREE_NODES})"
            )
        if not hasattr(self, "source"):
            raise BuildError(f"{ROLES[self.role]} is built of weights (give --checkpoint_dir, not --model_config)")
        self.source.check_length(max_seq_len)
        limits = Limits(max_batch_size, max_seq_len, max_draft_len)
        library = f"tensorrt {trt.__version__}"
        info = compiled_info(library, launch.device_arch(), "plugin", limits, self.source.draft_info)
        elements = self.largest_tensor(limits, info)
        if max_batch_size * elements > _MOST_ELEMENTS:
            raise BuildError(
                f"max_batch_size {max_batch_size} needs a tensor of {max_batch_size * elements} elements, "
                f"TensorRT takes {_MOST_ELEMENTS} (use --max_batch_size {_MOST_ELEMENTS // elements}, "
                "or a smaller --max_seq_len)"
            )
        return {"limits": limits, "info": info}

    def forward(self, limits: Limits, info: CompiledInfo) -> None:
        """Fill the network that is being built, and leave a description of the engine for its config.json."""
        graph, weights = self.source.place(limits, info)
        graph = lower(graph)
        profiles = self.profiles(limits, info)
        # Kept as long as the network: the parser owns the weights, and may map the files.
        self.files = tempfile.TemporaryDirectory(prefix=".ddtree-", dir=self.source.checkpoint.directory)
        self.parser = trt.OnnxParser(default_trtnet(), logger.trt_logger)
        weights.write(Path(self.files.name), lambda doing, done, total: None)
        path = Path(self.files.name, f"{graph.name}.onnx")
        path.write_bytes(graph.model().SerializeToString())
        if not self.parser.parse_from_file(str(path)):
            errors = [str(self.parser.get_error(i)) for i in range(self.parser.num_errors)]
            raise BuildError(f"TensorRT {trt.__version__} cannot parse {path.name}: {'; '.join(errors)} (report this)")
        _register_inputs(graph, profiles)
        self.add_tree_operation(limits, profiles)
        self.config.ddtree["engine"] = {
            "limits": dataclasses.asdict(limits),
            "compiled": dataclasses.asdict(info),
            "versions": {"tensorrt": trt.__version__, "tensorrt_llm": tensorrt_llm.__version__},
        }


class DDTreeTarget(_DDTreeModel):
    """The target: logits, context features, new rows of the KV caches, and the fields of Verified."""

    role = "target"

    def profiles(self, limits: Limits, info: CompiledInfo) -> list[Profile]:
        return target_profiles(info, limits, self.source.target_info)

    def largest_tensor(self, limits: Limits, info: CompiledInfo) -> int:
        """Elements a slot: of the attention scores of all heads, or of the logits."""
        model, nodes = self.source.target.decoder, limits.max_tree_nodes + 1
        rows = max(info.prefill_chunk, nodes)
        return max(model.num_attention_heads * rows * (info.target_cache_length + rows), nodes * model.vocab_size)

    def add_tree_operation(self, limits: Limits, profiles: list[Profile]) -> None:
        draft = self.source.draft_info
        constants = ("logits", "thresholds", "max_depth_shape")
        given = {spec.name: _input(spec, profiles) for spec in VERIFY_TREE.inputs if spec.name not in constants}
        settings = {name: given[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
        optional = {name: given[name] for name in ("token_bitmask", "coins", "final_coin")}
        verified = tree_operations.verify_tree(
            _output("logits"),
            given,
            given["root_positions"],
            max_depth=draft.max_depth if draft else 1,
            **settings,
            **optional,
        )
        for spec in VERIFY_TREE.outputs:
            verified[spec.name].mark_output(spec.name, spec.dtype)


class DDTreeDraft(_DDTreeModel):
    """The drafter: draft logits, new rows of the KV caches, and the fields of DraftTree."""

    role = "draft"

    def profiles(self, limits: Limits, info: CompiledInfo) -> list[Profile]:
        return draft_profiles(info, limits, self.source.target_info, self.source.draft_info)

    def largest_tensor(self, limits: Limits, info: CompiledInfo) -> int:
        """Elements a slot: of the attention scores of all heads, or of the logits."""
        draft = self.source.draft
        updated = max(info.prefill_chunk, draft.max_depth + 1) + draft.block_size
        scores = draft.decoder.num_attention_heads * draft.block_size * (info.draft_cache_length + updated)
        return max(scores, draft.max_depth * draft.draft_vocab_size)

    def add_tree_operation(self, limits: Limits, profiles: list[Profile]) -> None:
        roots, table = (
            TensorSpec("root_token_ids", "int32", "B"),
            TensorSpec("draft_to_target", "int32", "mapped_vocab"),
        )
        ids = self.source.draft_to_target
        tree = tree_operations.build_tree(
            _output("draft_logits"),
            _input(roots, profiles),
            budget=limits.max_tree_nodes,
            # A constant must have elements. Without a table this is an input of none.
            draft_to_target=_input(table, profiles) if ids is None else constant(ids),
        )
        for spec in BUILD_TREE.outputs:
            tree[spec.name].mark_output(spec.name, spec.dtype)


def _input(spec: TensorSpec, profiles: list[Profile]) -> Tensor:
    """A new input of the network."""
    names = [DIMENSIONS.get(name, name) for name in spec.dimensions]
    ranges = OrderedDict((name, [profile[name] for profile in profiles]) for name in names)
    return Tensor(name=spec.name, dtype=spec.dtype, shape=[-1] * len(names), dim_range=ranges)


def _output(name: str) -> Tensor:
    """An output of the network, as TensorRT-LLM's functions take it."""
    network = default_trtnet()
    tensors = (network.get_output(i) for i in range(network.num_outputs))
    (tensor,) = (each for each in tensors if each.name == name)
    return Tensor(is_network_input=False, network=default_net(), trt_tensor=tensor)


def _register_inputs(graph: Graph, profiles: list[Profile]) -> None:
    """Give TensorRT-LLM's network the ranges of the inputs that the parser has made.

    It keeps them in ``_inputs``, and makes its optimisation profiles of that. Its own way to make an input would add
    a second one of the same name.
    """
    network = default_trtnet()
    parsed = {tensor.name: tensor for tensor in (network.get_input(i) for i in range(network.num_inputs))}
    for value in graph.inputs:
        if value.name not in parsed:
            raise BuildError(f"TensorRT {trt.__version__} dropped the input {value.name} of {graph.name} (report this)")
        tensor = Tensor(is_network_input=False, network=default_net(), trt_tensor=parsed[value.name])
        dimensions = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        names = [dim if isinstance(dim, str) else f"{value.name}_{axis}" for axis, dim in enumerate(dimensions)]
        tensor.profiles = [
            DimRange([profile[dim] if isinstance(dim, str) else dim for dim in dimensions], names)
            for profile in profiles
        ]
        default_net()._inputs[value.name] = tensor


for _model in (DDTreeTarget, DDTreeDraft):
    MODEL_MAP[ROLES[_model.role]] = _model
