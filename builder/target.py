"""The target graph: one pass over a prompt chunk, a draft tree, or a single token.

in   input_ids int64 [batch, seq], position_ids int64 [batch, seq], attention_mask [batch, 1, seq, cache] (additive),
     write_index int64 [batch], logit_rows int64 [batch, rows] (rows of seq whose logits are wanted),
     past_key_values.{i}.key|value [batch, kv_heads, cache, head_dim]
out  logits [batch, rows, vocab], context_features [batch, seq, layers*hidden] (with a drafter only),
     present.{i}.key|value: the caches with the new rows at write_index
"""

import numpy as np

from .checkpoint import Checkpoint
from .config import TargetConfig
from .decoder import Decoder
from .errors import BuildError
from .experts import place_experts
from .graph import Graph
from .weights import Weight, Weights


def place_target(
    config: TargetConfig,
    weights: Weights,
    feature_layers: tuple[int, ...],
    positions: int,
    cache_length: int | None = None,
) -> Graph:
    """Place the target's nodes; ``model()`` of the result, once the weights are written, is the ONNX model.

    Args:
        feature_layers: layers whose outputs become context_features, in order; empty without a drafter.
        positions: the largest position plus one.
        cache_length: rows of a KV cache, or None for dynamic (ONNX Runtime).
    """
    graph = Graph("target")
    model = config.decoder
    dtype, hidden = weights.dtype, model.hidden_size
    ids = graph.input("input_ids", "int64", ["batch", "seq"])
    position_ids = graph.input("position_ids", "int64", ["batch", "seq"])
    logit_rows = graph.input("logit_rows", "int64", ["batch", "rows"])
    graph.output("logits", dtype, ["batch", "rows", model.vocab_size])
    if feature_layers:
        graph.output("context_features", dtype, ["batch", "seq", len(feature_layers) * hidden])
    decoder = Decoder(graph, weights, model, "model.", positions, cache_length)
    masks = decoder.declare("seq")

    batch_seq = graph.op("Shape", ids)
    query_shape, row_shape = (
        graph.op("Concat", batch_seq, graph.integers(heads, model.head_dim), axis=0)
        for heads in (model.num_attention_heads, model.num_key_value_heads)
    )
    unflatten = graph.op("Concat", batch_seq, graph.integers(-1), axis=0)  # [batch, seq, -1]

    embedding = graph.weight(embedding_weight(config, weights))
    x = graph.op("Gather", embedding, graph.op("Reshape", ids, graph.integers(-1)))  # [batch * seq, hidden]
    outputs = []  # of the layers
    for layer, mask in enumerate(masks):
        graph.scope = f"layers.{layer}/"
        h = decoder.norm(x, f"layers.{layer}.input_layernorm", hidden)
        q = decoder.queries(h, layer, query_shape, position_ids)
        key, value = decoder.update_caches(h, layer, row_shape, position_ids)
        x = graph.op("Add", x, decoder.attend(q, key, value, mask, layer))
        h = decoder.norm(x, f"layers.{layer}.post_attention_layernorm", hidden)
        sparse = model.experts is not None and model.experts.layers[layer]
        x = graph.op("Add", x, place_experts(decoder, h, layer) if sparse else decoder.mlp(h, layer))
        outputs.append(x)
    graph.scope = ""

    if feature_layers:
        features = graph.op("Concat", *(outputs[layer] for layer in feature_layers), axis=-1)
        graph.op("Reshape", features, unflatten, name="context_features")
    indices = graph.op("Unsqueeze", logit_rows, graph.integers(-1))  # [batch, rows, 1]
    x = graph.op("GatherND", graph.op("Reshape", x, unflatten), indices, batch_dims=1)  # [batch, rows, hidden]
    x = decoder.norm(graph.op("Reshape", x, graph.integers(-1, hidden)), "norm", hidden)
    x = graph.op("Gemm", x, graph.weight(head_weight(config, weights)), transB=1)
    rows_shape = graph.op("Concat", graph.op("Shape", logit_rows), graph.integers(model.vocab_size), axis=0)
    graph.op("Reshape", x, rows_shape, name="logits", allowzero=1)  # a pass may want no logits at all
    if config.tie_word_embeddings:
        _check_tied(weights.checkpoint)
    weights.refuse_unused(ignored=r"\.rotary_emb\.inv_freq$|^lm_head\.weight$")  # old Llamas have the first
    return graph


def embedding_weight(config: TargetConfig, weights: Weights) -> Weight:
    """[vocab, hidden]."""
    return weights.take("model.embed_tokens.weight", config.decoder.vocab_size, config.decoder.hidden_size)


def head_weight(config: TargetConfig, weights: Weights) -> Weight:
    """[vocab, hidden]; the embedding where the two are tied."""
    if config.tie_word_embeddings:
        return embedding_weight(config, weights)
    return weights.take("lm_head.weight", config.decoder.vocab_size, config.decoder.hidden_size)


def _check_tied(checkpoint: Checkpoint) -> None:
    """A head beside a tied embedding must be the same: transformers 4 takes the embedding, transformers 5 the head."""
    head, embedding = (checkpoint.tensors.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if head is None or embedding is None:
        return
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and all(
        np.array_equal(ours.view(np.uint8), theirs.view(np.uint8))
        for ours, theirs in zip(*(np.array_split(t.elements(), t.shape[0]) for t in (head, embedding)), strict=True)
    )
    if not same:
        raise BuildError(
            f"{checkpoint.directory}: tie_word_embeddings is true, but lm_head.weight differs from the embedding "
            "(set it to false in config.json if the head was trained on its own, else remove the tensor)"
        )
