"""What config.json says of a model, in one spelling for transformers 4 and 5.

A target is a grouped-query decoder of one of the architectures below; a drafter is a DFlash block-diffusion model
(arXiv 2602.06036), whose layers are Qwen3's, whatever the target's are.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

from .checkpoint import Checkpoint
from .errors import BuildError


@dataclass(frozen=True)
class _Architecture:
    """What transformers' model of an architecture does, and which keys of config.json it reads for it."""

    name: str  # in "architectures"
    qk_norm: bool = False  # RMSNorm on each query and key head
    qkv_bias: bool | None = None  # on query, key and value, not on the output; None: attention_bias says, for all four
    takes_attention_bias: bool = True
    takes_mlp_bias: bool = False
    windows: Literal["some", "all", "none"] = "some"  # layers with sliding_window; some: those that layer_types names
    window_switch: bool = True  # sliding_window counts only where use_sliding_window is true
    head_dim: int | None = None  # where config.json has none; None: hidden_size / num_attention_heads
    experts: bool = False


_ARCHITECTURES = {  # by model_type
    "qwen3": _Architecture("Qwen3ForCausalLM", qk_norm=True, head_dim=128),
    "qwen3_moe": _Architecture("Qwen3MoeForCausalLM", qk_norm=True, windows="all", experts=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", qkv_bias=True),
    "llama": _Architecture("LlamaForCausalLM", takes_mlp_bias=True, windows="none"),
    "mistral": _Architecture("MistralForCausalLM", takes_attention_bias=False, windows="all", window_switch=False),
}
# A drafter's class -> whether its block's first row is a candidate when config.json does not say: z-lab's DFlash reads
# the rows behind the anchor, DeepSeek's "block7" checkpoints (DSpark without its Markov head) read the anchor's too.
_DRAFT_ARCHITECTURES = {"DFlashDraftModel": False, "Qwen3DSparkModel": True}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base, and the scaling of its frequencies."""

    theta: float
    scaling: str  # "default", "linear" or "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # the last three: llama3 only
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class Experts:
    """Mixture of experts in place of the feed-forward network of some layers."""

    count: int
    per_token: int  # how many of them a token goes through
    intermediate_size: int
    normalized: bool  # the weights of a token's experts add up to 1
    layers: tuple[bool, ...]  # which layers have them


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a stack of decoder layers."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    window: int | None  # sliding window in tokens, of the layers marked in windowed
    windowed: tuple[bool, ...]  # per layer
    experts: Experts | None  # None: every layer has a dense feed-forward network

    @property
    def mixed_windows(self) -> bool:
        """Whether some layers have the window and some see everything."""
        return any(self.windowed) and not all(self.windowed)


@dataclass(frozen=True)
class TargetConfig:
    """The model being served."""

    decoder: DecoderConfig
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "TargetConfig":
        config, where = checkpoint.config, f"{checkpoint.directory}/config.json"
        if (architecture := _architecture(config)) in _DRAFT_ARCHITECTURES:
            raise BuildError(
                f"{where}: architecture {architecture!r} is a DFlash drafter, not a target "
                "(give the model that it drafts for as the target, and this one as the draft)"
            )
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
            raise BuildError(
                f"{where}: model_type {_spelled(model_type)} is not supported (supported: {', '.join(_ARCHITECTURES)})"
            )
        expected = _ARCHITECTURES[model_type].name
        if config.get("architectures") not in (None, [], [expected]):
            raise BuildError(
                f"{where}: architectures {_spelled(config['architectures'])} is not supported with model_type "
                f'"{model_type}" (supported: ["{expected}"])'
            )
        decoder = _decoder(config, where, _ARCHITECTURES[model_type])
        # generation_config.json knows of end tokens that config.json may not, such as the end of a chat turn.
        eos, bos = (
            _token_ids(source.get(key), decoder.vocab_size, f"{checkpoint.directory}: {key}")
            for key in ("eos_token_id", "bos_token_id")
            for source in [
                checkpoint.generation_config if checkpoint.generation_config.get(key) is not None else config
            ]
        )
        return cls(decoder, bool(config.get("tie_word_embeddings", False)), eos, bos[0] if bos else None)


@dataclass(frozen=True)
class DraftConfig:
    """The drafter, checked against its target."""

    decoder: DecoderConfig
    block_size: int  # rows: the anchor token and the masks
    sample_from_anchor: bool  # the anchor's row is depth 1; else the row behind it is
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    draft_vocab_size: int  # columns of draft_logits
    causal: bool  # in layers without window a block row sees no later block row
    window_causal: bool  # the same in layers with one

    @property
    def max_depth(self) -> int:
        """D, the rows of draft_logits."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: TargetConfig) -> "DraftConfig":
        config, where = checkpoint.config, f"{checkpoint.directory}/config.json"
        architecture = _architecture(config)
        if architecture not in _DRAFT_ARCHITECTURES:
            raise BuildError(
                f"{where}: architecture {architecture!r} is not a DFlash drafter "
                f"(use one of {', '.join(_DRAFT_ARCHITECTURES)})"
            )
        # DFlash keys stand in dflash_config or beside the others, as z-lab's loader allows.
        config = config | _object(config, "dflash_config", where)
        decoder = _decoder(config, where, _ARCHITECTURES["qwen3"])
        is_causal = config.get("is_causal")
        draft = cls(
            decoder=decoder,
            block_size=_integer(config, "block_size", where, default=16),
            sample_from_anchor=bool(config.get("sample_from_anchor", _DRAFT_ARCHITECTURES[architecture])),
            mask_token_id=_integer(config, "mask_token_id", where, least=0),
            target_layer_ids=_target_layer_ids(config, decoder, target, where),
            draft_vocab_size=_integer(config, "draft_vocab_size", where, default=decoder.vocab_size),
            # z-lab's model: layers with a window are causal unless is_causal says otherwise, the others are not.
            causal=bool(is_causal),
            window_causal=is_causal is None or bool(is_causal),
        )
        _check_pair(draft, target, config, where)
        return draft


# Keys of relatives (Gemma, Granite, Cohere, DeepSeek, DFlash's descendants) that change the logits, with the values at
# which they do not.
_NEUTRAL: dict[str, Any] = {
    "attention_chunk_size": None,
    "attention_multiplier": None,
    "attn_logit_softcapping": 0,
    "clip_qkv": None,
    "draft_adapter_rank": 0,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": 0,
    "input_embedding_scale": 1.0,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "markov_rank": 0,
    "n_shared_experts": 0,
    "no_rope_layers": None,
    "output_multiplier": 1.0,
    "query_pre_attn_scalar": None,
    "residual_multiplier": 1.0,
    "shared_expert_intermediate_size": 0,
}


def _check_pair(draft: DraftConfig, target: TargetConfig, config: dict[str, Any], where: str) -> None:
    remedy = "(this drafter belongs to another target)"
    for key in ("hidden_size", "vocab_size"):
        mine, theirs = getattr(draft.decoder, key), getattr(target.decoder, key)
        if mine != theirs:
            raise BuildError(f"{where}: {key} {mine} differs from the target's {theirs} {remedy}")
    layers = target.decoder.num_hidden_layers
    if config.get("num_target_layers") not in (None, layers):
        raise BuildError(
            f"{where}: num_target_layers {config['num_target_layers']} differs from the target's {layers} {remedy}"
        )
    for layer in draft.target_layer_ids:
        if not 0 <= layer < layers:
            raise BuildError(
                f"{where}: target_layer_ids has {layer}, but the target has layers 0 to {layers - 1} {remedy}"
            )
    if draft.mask_token_id >= target.decoder.vocab_size:
        raise BuildError(
            f"{where}: mask_token_id {draft.mask_token_id} is outside the target's vocabulary of "
            f"{target.decoder.vocab_size} {remedy}"
        )
    if draft.max_depth < 1:
        raise BuildError(f"{where}: block_size {draft.block_size} drafts no token (it must be at least 2)")
    if draft.draft_vocab_size > target.decoder.vocab_size:
        raise BuildError(
            f"{where}: draft_vocab_size {draft.draft_vocab_size} exceeds the target's vocabulary of "
            f"{target.decoder.vocab_size} {remedy}"
        )


def _target_layer_ids(
    config: dict[str, Any], decoder: DecoderConfig, target: TargetConfig, where: str
) -> tuple[int, ...]:
    ids = config.get("target_layer_ids")
    if ids is None:  # DFlash's own rule: from layer 1 to the third last, evenly
        layers, count = target.decoder.num_hidden_layers, decoder.num_hidden_layers
        if count == 1:
            return (layers // 2,)
        return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise BuildError(f"{where}: target_layer_ids {ids!r} is not a list of layer numbers (correct it)")
    return tuple(ids)


def _decoder(config: dict[str, Any], where: str, architecture: _Architecture) -> DecoderConfig:
    _check_computation(config, where, architecture)
    hidden, heads = _integer(config, "hidden_size", where), _integer(config, "num_attention_heads", where)
    kv_heads = _integer(config, "num_key_value_heads", where, default=heads)
    if heads % kv_heads:
        raise BuildError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads} "
            "(correct config.json)"
        )
    head_dim = _integer(config, "head_dim", where, default=architecture.head_dim or hidden // heads)
    if head_dim % 2:
        raise BuildError(f"{where}: head_dim {head_dim} is odd (rotary embedding needs an even one)")
    layers = _integer(config, "num_hidden_layers", where)
    window, windowed = _windows(config, layers, where, architecture)
    bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        model_type=str(config.get("model_type")),
        vocab_size=_integer(config, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size", where),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(config, "rms_norm_eps", where, default=1e-6),
        max_position_embeddings=_integer(config, "max_position_embeddings", where),
        rope=_rope(config, where),
        qk_norm=architecture.qk_norm,
        qkv_bias=bias if architecture.qkv_bias is None else architecture.qkv_bias,
        output_bias=bias if architecture.qkv_bias is None else False,
        mlp_bias=bool(config.get("mlp_bias", False)),
        window=window,
        windowed=windowed,
        experts=_experts(config, layers, where) if architecture.experts else None,
    )


def _check_computation(config: dict[str, Any], where: str, architecture: _Architecture) -> None:
    """Refuse what the graphs do not compute."""
    if config.get("quantization_config") is not None:
        method = _object(config, "quantization_config", where).get("quant_method", "unknown method")
        raise BuildError(
            f"{where}: the weights are quantized ({method}), and the graphs multiply plain floats only "
            "(use the float16, bfloat16 or float32 checkpoint)"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise BuildError(f"{where}: hidden_act {_spelled(config['hidden_act'])} is not supported (supported: silu)")
    for key, taken in (
        ("attention_bias", architecture.takes_attention_bias),
        ("mlp_bias", architecture.takes_mlp_bias),
    ):
        if config.get(key) and not taken:
            raise BuildError(
                f"{where}: {key} is not supported with {architecture.name}, which has none in transformers "
                "(remove the key if the weights have no such tensors)"
            )
    for key, neutral in _NEUTRAL.items():
        if config.get(key) not in (None, neutral):
            raise BuildError(
                f"{where}: {key} {_spelled(config[key])} is not supported (it changes the logits; use a model without)"
            )


def _windows(
    config: dict[str, Any], layers: int, where: str, architecture: _Architecture
) -> tuple[int | None, tuple[bool, ...]]:
    """The sliding window, and which layers have it."""
    switched_off = architecture.window_switch and not config.get("use_sliding_window", False)
    if config.get("sliding_window") is None or switched_off:
        return None, (False,) * layers
    if architecture.windows == "none":
        raise BuildError(
            f"{where}: use_sliding_window is not supported with {architecture.name} (transformers has no window there; "
            "set it to false if the model was trained without)"
        )
    window = _integer(config, "sliding_window", where)
    kinds = {"full_attention", "sliding_attention"} if architecture.windows == "some" else {"sliding_attention"}
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or not all(kind in kinds for kind in types):
            raise BuildError(
                f"{where}: layer_types must be {layers} of {' and '.join(sorted(kinds))} with {architecture.name} "
                "(correct config.json)"
            )
        windowed = tuple(kind == "sliding_attention" for kind in types)
    elif architecture.windows == "all":
        windowed = (True,) * layers
    else:
        first = _integer(config, "max_window_layers", where, least=0, default=28)  # transformers' default
        windowed = tuple(layer >= first for layer in range(layers))
    return (window if any(windowed) else None), windowed


def _experts(config: dict[str, Any], layers: int, where: str) -> Experts | None:
    count = _integer(config, "num_experts" if "num_experts" in config else "num_local_experts", where, least=0)
    step = _integer(config, "decoder_sparse_step", where, default=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise BuildError(f"{where}: mlp_only_layers {_spelled(dense)} is not a list of layer numbers (correct it)")
    sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    if count == 0 or not any(sparse):
        return None
    per_token = _integer(config, "num_experts_per_tok", where)
    if per_token > count:
        raise BuildError(
            f"{where}: num_experts_per_tok {per_token} exceeds the number of experts, {count} (correct config.json)"
        )
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=_integer(config, "moe_intermediate_size", where),
        normalized=bool(config.get("norm_topk_prob", False)),
        layers=sparse,
    )


def _rope(config: dict[str, Any], where: str) -> Rope:
    # transformers 5: rope_parameters holds all of it; transformers 4: rope_theta, and rope_scaling where there is any.
    # transformers 5 reads the older spelling first where a file has both.
    stated = _object(config, "rope_scaling", where) or _object(config, "rope_parameters", where)
    parameters = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")} | stated
    if nested := [key for key, value in stated.items() if isinstance(value, dict)]:
        raise BuildError(
            f"{where}: rope_parameters differ by layer ({', '.join(nested)}), which is not supported "
            "(supported: one set for all layers)"
        )
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise BuildError(f"{where}: rope type {_spelled(kind)} is not supported (supported: default, linear, llama3)")
    if parameters["partial_rotary_factor"] not in (None, 1):
        raise BuildError(
            f"{where}: partial_rotary_factor {_spelled(parameters['partial_rotary_factor'])} is not supported "
            "(only whole heads are rotated)"
        )
    theta = _number(parameters, "rope_theta", where, default=10000.0)
    if kind == "default":
        return Rope(theta, kind)
    factor = _number(parameters, "factor", where)
    if kind == "linear":
        return Rope(theta, kind, factor)
    return Rope(
        theta,
        kind,
        factor,
        _number(parameters, "low_freq_factor", where),
        _number(parameters, "high_freq_factor", where),
        _integer(parameters, "original_max_position_embeddings", where),
    )


def _architecture(config: dict[str, Any]) -> str | None:
    """The first name in "architectures"; None where there is none."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) else None


def _spelled(value: Any) -> str:
    """As config.json spells it."""
    return json.dumps(value)


def _object(config: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BuildError(f"{where}: {key} is {value!r}, not a JSON object (correct config.json)")
    return value


def _integer(config: dict[str, Any], key: str, where: str, *, least: int = 1, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if type(value) is not int or value < least:
        raise BuildError(f"{where}: {key} is {value!r}, not a whole number of at least {least} (correct config.json)")
    return value


def _number(config: dict[str, Any], key: str, where: str, *, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or value <= 0:
        raise BuildError(f"{where}: {key} is {value!r}, not a positive number (correct config.json)")
    return float(value)


def _token_ids(value: Any, vocab_size: int, where: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BuildError(f"{where} {token!r} is not a token of the vocabulary of {vocab_size} (correct it)")
    return tuple(ids)
