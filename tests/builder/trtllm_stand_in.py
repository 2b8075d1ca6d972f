"""What ``trtllm-build`` of TensorRT-LLM 1.2 does with a model class, over the library of TensorRT for RTX.

The modules ``tensorrt_llm`` and ``tensorrt`` that are installed here have the names of ``trtllm_signatures`` and no
others, and bind every call against it. The network is real, and so is the parser that fills it: those of the library
for RTX, which needs no GPU. It has no plugins. A layer of the tree operations is written down, and its outputs are
constants of the right type.
"""

import copy
import json
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorrt_rtx

import ddtree.plugins
from ddtree.builder import compile
from ddtree.plugins import launch
from ddtree.plugins.operations import BUILD_TREE, DRAFT_TOPK, VERIFY_TREE

from .trtllm_signatures import (
    CONFIG,
    LAYER_TYPES,
    MAPPING,
    POSITION_EMBEDDING_TYPES,
    PREPARE_INPUTS,
    QUANTIZATION,
    TENSORRT_VERSION,
    VERSION,
    accepts,
    bind,
)

ARCH = "sm_120"
DTYPES = {name: getattr(tensorrt_rtx, name) for name in ("float32", "float16", "bfloat16", "int32", "int64")}
_MODULES = (
    "tensorrt",
    "tensorrt_llm",
    "tensorrt_llm._common",
    "tensorrt_llm.functional",
    "tensorrt_llm.logger",
    "tensorrt_llm.models",
    "tensorrt_llm.models.modeling_utils",
)


class INetworkDefinition:
    """TensorRT's network. What the module may call of it is bound; the rest of the test reads ``real``."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.layers: list[PluginLayer] = []

    @property
    def num_inputs(self) -> int:
        return self.real.num_inputs

    @property
    def num_outputs(self) -> int:
        return self.real.num_outputs

    def get_input(self, *args: Any, **kwargs: Any) -> Any:
        return self.real.get_input(bind("tensorrt.INetworkDefinition.get_input", *args, **kwargs)["index"])

    def get_output(self, *args: Any, **kwargs: Any) -> Any:
        return self.real.get_output(bind("tensorrt.INetworkDefinition.get_output", *args, **kwargs)["index"])


class OnnxParser:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = bind("tensorrt.OnnxParser", *args, **kwargs)
        self._real = tensorrt_rtx.OnnxParser(given["network"].real, given["logger"])

    def parse_from_file(self, *args: Any, **kwargs: Any) -> bool:
        return self._real.parse_from_file(bind("tensorrt.OnnxParser.parse_from_file", *args, **kwargs)["model"])

    def get_error(self, *args: Any, **kwargs: Any) -> Any:
        return self._real.get_error(bind("tensorrt.OnnxParser.get_error", *args, **kwargs)["index"])

    @property
    def num_errors(self) -> int:
        return self._real.num_errors


class Network:
    """tensorrt_llm.network.Network: TensorRT's network and, by name, the inputs whose ranges are known."""

    def __init__(self) -> None:
        self.builder = tensorrt_rtx.Builder(compile._logger(tensorrt_rtx))
        self.trt_network = INetworkDefinition(self.builder.create_network(0))
        self._inputs: dict[str, Tensor] = {}


@dataclass(eq=False)
class PluginLayer:
    """A layer of the tree operations: what it was given."""

    name: str
    inputs: list[Any]
    attributes: dict[str, Any]
    outputs: list[Any] = field(default_factory=list)

    def get_output(self, index: int) -> Any:
        return self.outputs[index]


class DimRange:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = bind("tensorrt_llm.functional.DimRange", *args, **kwargs)
        self.dimension_names = given["names"]
        assert len(given["names"]) == len(given["shape"])
        ranges = [dim if isinstance(dim, tuple | list) else (dim, dim, dim) for dim in given["shape"]]
        assert all(0 <= least <= best <= most for least, best, most in ranges)
        self.min, self.opt, self.max = (list(sizes) for sizes in zip(*ranges, strict=True))


class Tensor:
    """tensorrt_llm.functional.Tensor: a new input of the network, or a name for a tensor that is there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = bind("tensorrt_llm.functional.Tensor", *args, **kwargs)
        self.profiles: list[DimRange] = []
        if given["trt_tensor"] is not None:
            assert given["network"] is not None
            assert not given["is_network_input"]
            self.trt_tensor = given["trt_tensor"]
            return
        ranges, network = given["dim_range"], default_net()
        assert isinstance(ranges, OrderedDict)
        for profile in range(len(next(iter(ranges.values())))):
            self.profiles.append(DimRange([sizes[profile] for sizes in ranges.values()], list(ranges)))
        dtype = DTYPES[given["dtype"]]
        self.trt_tensor = network.trt_network.real.add_input(given["name"], dtype, given["shape"])
        for axis, name in enumerate(ranges):
            self.trt_tensor.set_dimension_name(axis, name)
        network._inputs[given["name"]] = self

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.trt_tensor.shape)

    def mark_output(self, *args: Any, **kwargs: Any) -> None:
        given = bind("tensorrt_llm.functional.Tensor.mark_output", *args, **kwargs)
        assert self.trt_tensor.dtype == DTYPES[given["dtype"]], f"{given['name']} would get a cast"
        default_net().trt_network.real.mark_output(self.trt_tensor)
        self.trt_tensor.name = given["name"]


class PretrainedConfig:
    def __init__(self, **settings: Any) -> None:
        given = CONFIG.bind(**settings)
        given.apply_defaults()
        mapping, quantization = given.arguments["mapping"] or {}, given.arguments["quantization"] or {}
        assert given.arguments["position_embedding_type"] in POSITION_EMBEDDING_TYPES
        assert set(mapping) <= set(MAPPING)
        assert set(quantization) <= set(QUANTIZATION)
        self.__dict__.update(given.arguments | given.arguments["kwargs"])
        self.mapping = types.SimpleNamespace(**{"world_size": 1, "rank": 0} | mapping)
        del self.kwargs

    @classmethod
    def from_json_file(cls, *args: Any, **kwargs: Any) -> "PretrainedConfig":
        name = "tensorrt_llm.models.modeling_utils.PretrainedConfig.from_json_file"
        content = json.loads(Path(bind(name, *args, **kwargs)["config_file"]).read_text())
        sys.modules["tensorrt_llm.models"].MODEL_MAP[content["architecture"]]  # KeyError: not made known
        return cls(**content)

    def to_dict(self) -> dict[str, Any]:
        output = copy.deepcopy(self.__dict__)
        output["mapping"] = vars(output["mapping"])
        return output


class PretrainedModel:
    """Without what trtllm-build does to submodules and parameters: our models have none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = bind("tensorrt_llm.models.modeling_utils.PretrainedModel", *args, **kwargs)
        self.config = given["config"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)  # type: ignore[attr-defined]


_current: list[Network] = []


def default_net(*args: Any, **kwargs: Any) -> Network:
    bind("tensorrt_llm._common.default_net", *args, **kwargs)
    return _current[-1]


def default_trtnet(*args: Any, **kwargs: Any) -> INetworkDefinition:
    bind("tensorrt_llm._common.default_trtnet", *args, **kwargs)
    return _current[-1].trt_network


def constant(*args: Any, **kwargs: Any) -> Tensor:
    values = bind("tensorrt_llm.functional.constant", *args, **kwargs)["ndarray"]
    return Tensor(is_network_input=False, network=default_net(), trt_tensor=_constant(values))


def shape(*args: Any, **kwargs: Any) -> Tensor:
    tensor = bind("tensorrt_llm.functional.shape", *args, **kwargs)["input"].trt_tensor
    sizes = default_net().trt_network.real.add_shape(tensor).get_output(0)
    return Tensor(is_network_input=False, network=default_net(), trt_tensor=sizes)


def _create_tensor(*args: Any, **kwargs: Any) -> Tensor:
    given = bind("tensorrt_llm.functional._create_tensor", *args, **kwargs)
    return Tensor(is_network_input=False, network=default_net(), trt_tensor=given["trt_tensor"])


_constants: list[np.ndarray] = []  # the library keeps addresses


def _constant(values: np.ndarray) -> Any:
    _constants.append(np.ascontiguousarray(values))
    network = default_net().trt_network.real
    return network.add_constant(values.shape, tensorrt_rtx.Weights(_constants[-1])).get_output(0)


def _add_layer(network: INetworkDefinition, name: str, inputs: list[Any], **attributes: Any) -> PluginLayer:
    """``ddtree.plugins.tensorrt.add_layer``: checks types and ranks against the table, and gives constants."""
    operation = {each.name: each for each in (DRAFT_TOPK, BUILD_TREE, VERIFY_TREE)}[name]
    operation.attribute_numbers(attributes)
    for tensor, spec in zip(inputs, operation.inputs, strict=True):
        allowed = operation.types if spec.dtype == "T" else (spec.dtype,)
        assert tensor.dtype in [DTYPES[each] for each in allowed], spec.name
        assert len(tensor.shape) == len(spec.dimensions), spec.name
    layer = PluginLayer(name, inputs, attributes)
    for spec in operation.outputs:
        layer.outputs.append(_constant(np.zeros([1] * len(spec.dimensions), spec.dtype)))
    network.layers.append(layer)
    return layer


@contextmanager
def installed(version: str = VERSION) -> Iterator[None]:
    """``tensorrt_llm``, ``tensorrt`` and our plugins are there, on a machine with a GPU of sm_120."""
    with pytest.MonkeyPatch.context() as patch:
        modules = {name: types.ModuleType(name) for name in _MODULES}
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(modules[parent], child, module)
        vars(modules["tensorrt"]).update(__version__=TENSORRT_VERSION, OnnxParser=OnnxParser)
        vars(modules["tensorrt_llm"]).update(__version__=version)
        vars(modules["tensorrt_llm._common"]).update(default_net=default_net, default_trtnet=default_trtnet)
        vars(modules["tensorrt_llm.functional"]).update(
            DimRange=DimRange, Tensor=Tensor, constant=constant, shape=shape, _create_tensor=_create_tensor
        )
        vars(modules["tensorrt_llm.logger"]).update(
            logger=types.SimpleNamespace(trt_logger=compile._logger(tensorrt_rtx))
        )
        vars(modules["tensorrt_llm.models"]).update(MODEL_MAP={})
        vars(modules["tensorrt_llm.models.modeling_utils"]).update(
            PretrainedConfig=PretrainedConfig, PretrainedModel=PretrainedModel
        )
        plugins = types.ModuleType("ddtree.plugins.tensorrt")
        vars(plugins).update(register=lambda face: face, add_layer=_add_layer)
        patch.setitem(sys.modules, "ddtree.plugins.tensorrt", plugins)
        patch.setattr(ddtree.plugins, "tensorrt", plugins, raising=False)
        patch.setattr(launch, "device_arch", lambda: ARCH)
        yield


def trtllm_build(
    checkpoint_dir: Path,
    output_dir: Path,
    model_cls_file: Path,
    model_cls_name: str,
    dry_run: bool = False,
    **options: Any,
) -> Network:
    """``trtllm-build`` with these options, in the order in which it does things; returns the network that it built.

    Args:
        dry_run: all but the engine, as with ``trtllm-build --dry_run``.
    """
    module = SourceFileLoader("models", str(model_cls_file)).load_module()
    model_cls = getattr(module, model_cls_name)
    config = PretrainedConfig.from_json_file(f"{checkpoint_dir}/config.json")
    accepts(model_cls.from_checkpoint, str(checkpoint_dir), config=config)
    model = model_cls.from_checkpoint(str(checkpoint_dir), config=copy.deepcopy(config))

    arguments = PREPARE_INPUTS | {"max_seq_len": model.config.max_position_embeddings} | options
    if arguments["max_draft_len"] == 0:
        arguments["max_draft_len"] = getattr(model.config, "max_draft_len", 0)
    network = Network()
    _current.append(network)
    try:
        model(**model.prepare_inputs(**arguments))
    finally:
        _current.pop()
    _look_through(network)
    config = _engine_config(network)
    output_dir.mkdir(parents=True)
    if not dry_run:
        plan = network.builder.build_serialized_network(network.trt_network.real, config)
        assert plan is not None
        (output_dir / "rank0.engine").write_bytes(plan)
    content = {"version": VERSION, "pretrained_config": model.config.to_dict(), "build_config": options}
    (output_dir / "config.json").write_text(json.dumps(content))
    return network


def _look_through(network: Network) -> None:
    """What graph rewriting does before the build."""
    real = network.trt_network.real
    for layer in (real.get_layer(i) for i in range(real.num_layers)):
        if layer.type.name not in LAYER_TYPES:
            raise NotImplementedError(f"Unknown layer type: {layer.type}")


def _engine_config(network: Network) -> Any:
    """Optimisation profiles out of ``_inputs``, as TensorRT-LLM makes and checks them."""
    builder = network.builder
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(tensorrt_rtx.ComputeCapability.SM120, 0)
    for number in range(len(next(iter(network._inputs.values())).profiles)):
        profile, by_name = builder.create_optimization_profile(), {}
        for name, tensor in network._inputs.items():
            ranges = tensor.profiles[number]
            profile.set_shape(name, ranges.min, ranges.opt, ranges.max)
            for dimension, sizes in zip(
                ranges.dimension_names, zip(ranges.min, ranges.opt, ranges.max, strict=True), strict=True
            ):
                assert by_name.setdefault(dimension, sizes) == sizes, f"{dimension} of {name}"
        assert config.add_optimization_profile(profile) == number
    return config
