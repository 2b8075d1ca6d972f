"""The draft graph: a DFlash block-diffusion drafter (arXiv 2602.06036), one pass per round.

Keys and values come from two kinds of rows: the target's features of newly accepted tokens, which stay in the cache,
and the block (anchor token and masks), which the next round overwrites. One TensorScatter a layer writes both.

in   context_features [batch, ctx, layers*hidden], context_position_ids int64 [batch, ctx],
     block_ids int64 [batch, block], block_position_ids int64 [batch, block],
     attention_mask [batch, 1, block, cache] (additive), write_index int64 [batch],
     past_key_values.{i}.key|value [batch, kv_heads, cache, head_dim]
out  draft_logits [batch, D, draft vocabulary],
     present.{i}.key|value: the caches with ctx + block new rows at write_index
"""

import numpy as np

from .checkpoint import Checkpoint
from .config import DraftConfig, TargetConfig
from .decoder import Decoder
from .errors import BuildError
from .graph import Graph
from .target import embedding_weight, head_weight
from .weights import Weights


def place_draft(
    config: DraftConfig,
    weights: Weights,
    target: TargetConfig,
    target_weights: Weights,
    positions: int,
    cache_length: int | None = None,
) -> Graph:
    """Place the drafter's nodes; ``model()`` of the result, once the weights are written, is the ONNX model.

    Args:
        target, target_weights: where embedding and head come from, unless the drafter's checkpoint has its own.
        positions: the largest position plus one.
        cache_length: rows of a KV cache, or None for dynamic (ONNX Runtime).
    """
    graph = Graph("draft")
    model = config.decoder
    dtype, hidden, block = weights.dtype, model.hidden_size, config.block_size
    width = len(config.target_layer_ids) * hidden
    features = graph.input("context_features", dtype, ["batch", "ctx", width])
    context_positions = graph.input("context_position_ids", "int64", ["batch", "ctx"])
    block_ids = graph.input("block_ids", "int64", ["batch", block])
    block_positions = graph.input("block_position_ids", "int64", ["batch", block])
    graph.output("draft_logits", dtype, ["batch", config.max_depth, config.draft_vocab_size])
    prefix = "model." if "model.fc.weight" in weights.checkpoint.tensors else ""
    decoder = Decoder(graph, weights, model, prefix, positions, cache_length)
    masks = decoder.declare(block)

    row_positions = graph.op("Concat", context_positions, block_positions, axis=1)  # [batch, ctx + block]
    query_shape = graph.integers(-1, block, model.num_attention_heads, model.head_dim)
    row_shape = graph.op(
        "Concat", graph.op("Shape", row_positions), graph.integers(model.num_key_value_heads, model.head_dim), axis=0
    )
    flat = graph.integers(-1, hidden)

    context = decoder.linear(graph.op("Reshape", features, graph.integers(-1, width)), "fc", width, hidden)
    context = decoder.norm(context, "hidden_norm", hidden)
    batch_ctx = graph.op("Shape", context_positions)
    context = graph.op("Reshape", context, graph.op("Concat", batch_ctx, graph.integers(hidden), axis=0))

    embedding = weights.find(f"{prefix}embed_tokens.weight", model.vocab_size, hidden) or embedding_weight(
        target, target_weights
    )
    x = graph.op("Gather", graph.weight(embedding), graph.op("Reshape", block_ids, graph.integers(-1)))
    for layer, mask in enumerate(masks):
        graph.scope = f"layers.{layer}/"
        h = decoder.norm(x, f"layers.{layer}.input_layernorm", hidden)  # [batch * block, hidden]
        rows = graph.op("Concat", context, graph.op("Reshape", h, graph.integers(-1, block, hidden)), axis=1)
        q = decoder.queries(h, layer, query_shape, block_positions)
        key, value = decoder.update_caches(graph.op("Reshape", rows, flat), layer, row_shape, row_positions)
        x = graph.op("Add", x, decoder.attend(q, key, value, mask, layer))
        h = decoder.norm(x, f"layers.{layer}.post_attention_layernorm", hidden)
        x = graph.op("Add", x, decoder.mlp(h, layer))
    graph.scope = ""

    if not config.sample_from_anchor:
        x = graph.op("Reshape", x, graph.integers(-1, block, hidden))
        x = graph.op("Slice", x, graph.integers(1), graph.integers(block), graph.integers(1))
        x = graph.op("Reshape", x, flat)
    x = decoder.norm(x, "norm", hidden)
    head = weights.find("lm_head.weight", config.draft_vocab_size, hidden)
    if head is None and config.draft_vocab_size != model.vocab_size:
        raise BuildError(
            f"{weights.checkpoint.directory} has draft_vocab_size {config.draft_vocab_size} but no lm_head.weight "
            "(the weights are incomplete)"
        )
    head = head or head_weight(target, target_weights)
    if graph.weights.get(head.name, head) is not head:
        raise BuildError(
            f"{weights.checkpoint.directory} has its own {head.name}, which is the head in a target that ties the two "
            "(give the drafter a tensor lm_head.weight)"
        )
    x = graph.op("Gemm", x, graph.weight(head), transB=1)
    graph.op("Reshape", x, graph.integers(-1, config.max_depth, config.draft_vocab_size), name="draft_logits")
    weights.refuse_unused(ignored=r"^(?!.*\blayers\.)|\.rotary_emb\.inv_freq$")  # outside layers: parts for training
    return graph


def draft_to_target(config: DraftConfig, checkpoint: Checkpoint) -> np.ndarray | None:
    """Absolute target ids of a reduced draft vocabulary, int32 [draft_vocab]; None where it is the target's.

    Checkpoints keep the table as ``d2t``, some as target ids, some as target id minus draft id. ``t2d``, which marks
    the target ids that are in the draft vocabulary, decides; without it, the reading that gives distinct valid ids.
    """
    size, vocab_size = config.draft_vocab_size, config.decoder.vocab_size
    if size == vocab_size:
        return None
    table = checkpoint.tensor("d2t", (size,)).elements().astype(np.int64)
    readings = [
        ids
        for ids in (table, table + np.arange(size))
        if ids.min() >= 0 and ids.max() < vocab_size and len(np.unique(ids)) == size
    ]
    if "t2d" in checkpoint.tensors:
        marked = np.flatnonzero(checkpoint.tensor("t2d", (vocab_size,)).elements())
        readings = [ids for ids in readings if np.array_equal(np.sort(ids), marked)]
    if not readings:
        raise BuildError(
            f"{checkpoint.directory}: d2t does not name {size} tokens of the target's {vocab_size} "
            "(the weights are damaged)"
        )
    if not all(np.array_equal(ids, readings[0]) for ids in readings):
        raise BuildError(
            f"{checkpoint.directory}: d2t may hold target ids or offsets (add the tensor t2d, which tells)"
        )
    return readings[0].astype(np.int32)
