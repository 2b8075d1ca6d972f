"""What config.json says of a model, in one spelling for transformers 4 and 5.

A target is a dense decoder of the Qwen3 or Llama 3 architecture; a drafter is a DFlash block-diffusion model
(arXiv 2602.06036), whose layers are Qwen3's.
"""

from dataclasses import dataclass
from typing import Any

from .checkpoint import Checkpoint
from .errors import BuildError

_QK_NORM = {"qwen3": True, "llama": False}  # model_type -> RMSNorm on each query and key head
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
    attention_bias: bool
    mlp_bias: bool
    window: int | None  # sliding window in tokens, of the layers marked in windowed
    windowed: tuple[bool, ...]  # per layer

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
        model_type = config.get("model_type")
        if model_type not in _QK_NORM:
            raise BuildError(f"{where}: model_type {model_type!r} is not supported (use one of {', '.join(_QK_NORM)})")
        decoder = _decoder(config, where, qk_norm=_QK_NORM[model_type])
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
        architecture = next(iter(config.get("architectures") or []), None)
        if architecture not in _DRAFT_ARCHITECTURES:
            raise BuildError(
                f"{where}: architecture {architecture!r} is not a DFlash drafter "
                f"(use one of {', '.join(_DRAFT_ARCHITECTURES)})"
            )
        # DFlash keys stand in dflash_config or beside the others, as z-lab's loader allows.
        config = config | _object(config, "dflash_config", where)
        for key, neutral in _NEUTRAL.items():
            if config.get(key) not in (None, neutral):
                raise BuildError(f"{where}: {key} {config[key]} is not supported (use a drafter without it)")
        decoder = _decoder(config, where, qk_norm=True)
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


# Keys of DFlash descendants that change the logits, with the values at which they do not.
_NEUTRAL: dict[str, Any] = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0,
    "markov_rank": 0,
    "draft_adapter_rank": 0,
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


def _decoder(config: dict[str, Any], where: str, *, qk_norm: bool) -> DecoderConfig:
    if config.get("quantization_config") is not None:
        method = _object(config, "quantization_config", where).get("quant_method", "unknown method")
        raise BuildError(
            f"{where}: the weights are quantized, {method} (use the float16, bfloat16 or float32 checkpoint)"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise BuildError(f"{where}: hidden_act {config['hidden_act']!r} is not supported (only silu is)")
    hidden, heads = _integer(config, "hidden_size", where), _integer(config, "num_attention_heads", where)
    kv_heads = _integer(config, "num_key_value_heads", where, default=heads)
    if heads % kv_heads:
        raise BuildError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads} "
            "(correct config.json)"
        )
    head_dim = _integer(config, "head_dim", where, default=hidden // heads)
    if head_dim % 2:
        raise BuildError(f"{where}: head_dim {head_dim} is odd (rotary embedding needs an even one)")
    layers = _integer(config, "num_hidden_layers", where)
    window, windowed = _windows(config, layers, where)
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
        qk_norm=qk_norm,
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        window=window,
        windowed=windowed,
    )


def _windows(config: dict[str, Any], layers: int, where: str) -> tuple[int | None, tuple[bool, ...]]:
    if config.get("sliding_window") is None or not config.get("use_sliding_window", False):
        return None, (False,) * layers
    window = _integer(config, "sliding_window", where)
    types = config.get("layer_types")
    if types is None:
        first = _integer(config, "max_window_layers", where, least=0, default=layers)
        windowed = tuple(layer >= first for layer in range(layers))
    elif not isinstance(types, list) or len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
        raise BuildError(f"{where}: layer_types must be {layers} of full_attention and sliding_attention (correct it)")
    else:
        windowed = tuple(kind == "sliding_attention" for kind in types)
    return (window if any(windowed) else None), windowed


def _rope(config: dict[str, Any], where: str) -> Rope:
    # transformers 5: rope_parameters holds all of it; transformers 4: rope_theta, and rope_scaling where there is any.
    parameters = _object(config, "rope_parameters", where)
    if not parameters:
        parameters = {"rope_theta": config.get("rope_theta"), **_object(config, "rope_scaling", where)}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise BuildError(f"{where}: rope scaling {kind!r} is not supported (default, linear and llama3 are)")
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise BuildError(f"{where}: partial_rotary_factor is not supported (only whole heads are rotated)")
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
