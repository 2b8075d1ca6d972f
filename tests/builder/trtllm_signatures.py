"""TensorRT-LLM 1.2 and TensorRT 10.14 as ``trtllm_models`` sees them: names, parameters and defaults, nothing else.

Written down from the public sources of TensorRT-LLM (``builder.py``, ``commands/build.py``, ``functional.py``,
``graph_rewriting.py``, ``models/modeling_utils.py``, ``network.py``) and from TensorRT's documentation. The stand-in
binds every call against it, and has no name that is not here.
"""

import inspect
from inspect import Parameter, Signature
from typing import Any

VERSION = "1.2.1"
TENSORRT_VERSION = "10.14.1.48"

_REQUIRED = Parameter.empty


def _signature(*positional: str, keyword_only: bool = False, **defaults: Any) -> Signature:
    """``positional`` have no default; ``defaults`` follow, or are keyword-only."""
    kind = Parameter.KEYWORD_ONLY if keyword_only else Parameter.POSITIONAL_OR_KEYWORD
    return Signature(
        [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in positional]
        + [Parameter(name, kind, default=value) for name, value in defaults.items()]
    )


FUNCTIONS: dict[str, Signature] = {
    "tensorrt_llm._common.default_net": _signature(),
    "tensorrt_llm._common.default_trtnet": _signature(),
    "tensorrt_llm.functional.DimRange": _signature("shape", "names"),
    "tensorrt_llm.functional.Tensor": _signature(
        name=None,
        dtype=None,
        shape=None,
        dim_range=None,
        is_network_input=True,
        location="DEVICE",
        network=None,
        trt_tensor=None,
    ),
    "tensorrt_llm.functional.Tensor.mark_output": _signature(name=None, dtype=None),
    "tensorrt_llm.functional._create_tensor": _signature("trt_tensor", "producer"),
    "tensorrt_llm.functional.constant": _signature("ndarray", as_dtype=None, as_shape=None),
    "tensorrt_llm.functional.shape": _signature("input", dim=None, cast_to_dtype=None, clip_before_cast=None),
    "tensorrt_llm.models.modeling_utils.PretrainedConfig.from_json_file": _signature("config_file"),
    "tensorrt_llm.models.modeling_utils.PretrainedModel": _signature("config"),
    "tensorrt.OnnxParser": _signature("network", "logger"),
    "tensorrt.OnnxParser.parse_from_file": _signature("model"),
    "tensorrt.OnnxParser.get_error": _signature("index"),
    "tensorrt.INetworkDefinition.get_input": _signature("index"),
    "tensorrt.INetworkDefinition.get_output": _signature("index"),
}

# What PretrainedConfig takes; all else in a config.json becomes an attribute, too, with a warning.
CONFIG = Signature(
    [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default)
        for name, default in {
            "architecture": _REQUIRED,
            "dtype": _REQUIRED,
            "hidden_size": _REQUIRED,
            "num_hidden_layers": _REQUIRED,
            "num_attention_heads": _REQUIRED,
            "vocab_size": None,
            "hidden_act": "gelu",
            "logits_dtype": "float32",
            "norm_epsilon": 1e-5,
            "position_embedding_type": "learned_absolute",
            "max_position_embeddings": None,
            "rotary_embedding_dim": None,
            "num_key_value_heads": None,
            "intermediate_size": None,
            "mapping": None,
            "quantization": None,
            "use_parallel_embedding": False,
            "embedding_sharding_dim": 0,
            "head_size": None,
            "qk_layernorm": False,
            "runtime_defaults": None,
        }.items()
    ]
    + [Parameter("kwargs", Parameter.VAR_KEYWORD)]
)
POSITION_EMBEDDING_TYPES = ("learned_absolute", "rope_gptj", "rope_gpt_neox", "long_rope", "alibi", "relative")
MAPPING = ("world_size", "rank", "gpus_per_node", "tp_size", "pp_size", "cp_size", "moe_tp_size", "moe_ep_size")
QUANTIZATION = ("quant_algo", "kv_cache_quant_algo", "group_size", "smoothquant_val", "clamp_val", "exclude_modules")

# With what trtllm-build calls prepare_inputs, by name; before, from_checkpoint(ckpt_dir, config=config).
PREPARE_INPUTS = {  # argument -> value when trtllm-build gets no option for it; all by name
    "max_batch_size": 2048,
    "max_input_len": 1024,
    "max_seq_len": None,  # max_position_embeddings
    "use_cache": True,
    "max_beam_width": 1,
    "max_num_tokens": 8192,
    "opt_num_tokens": None,
    "prompt_embedding_table_size": 0,
    "max_draft_len": 0,  # the config's, if it has one
    "speculative_decoding_draft_tokens_external": False,
    "gather_context_logits": False,
    "lora_target_modules": [],
}

# graph_rewriting.Layer.TRT_LAYER_TYPE_TO_LAYER: at any other type of layer trtllm-build stops, NotImplementedError.
# fmt: off
LAYER_TYPES = {
    "CONVOLUTION", "ACTIVATION", "POOLING", "LRN", "SCALE", "SOFTMAX", "DECONVOLUTION", "CONCATENATION", "ELEMENTWISE",
    "UNARY", "PADDING", "SHUFFLE", "REDUCE", "TOPK", "GATHER", "MATRIX_MULTIPLY", "RAGGED_SOFTMAX", "CONSTANT",
    "IDENTITY", "PLUGIN_V2", "PLUGIN_V3", "SLICE", "SHAPE", "PARAMETRIC_RELU", "RESIZE", "TRIP_LIMIT", "RECURRENCE",
    "ITERATOR", "LOOP_OUTPUT", "SELECT", "FILL", "QUANTIZE", "DEQUANTIZE", "CONDITION", "CONDITIONAL_INPUT",
    "CONDITIONAL_OUTPUT", "ASSERTION", "SCATTER", "EINSUM", "GRID_SAMPLE", "ONE_HOT", "NON_ZERO", "NMS",
    "REVERSE_SEQUENCE", "NORMALIZATION", "CAST", "DYNAMIC_QUANTIZE",
}
# fmt: on


def bind(function: str, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by parameter.

    Raises:
        TypeError: TensorRT-LLM's function does not take them.
    """
    try:
        bound = FUNCTIONS[function].bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{function}{FUNCTIONS[function]}: {error}") from None
    bound.apply_defaults()
    return bound.arguments


def accepts(function: Any, *args: Any, **kwargs: Any) -> None:
    """Bind a call that TensorRT-LLM makes against a function of ours."""
    inspect.signature(function).bind(*args, **kwargs)
