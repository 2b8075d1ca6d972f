"""The tree operations inside engines: ``draft_topk`` and ``build_tree`` end the draft's, ``verify_tree`` the target's.

Inputs and outputs are called as in the table of operations, ``ddtree.plugins.operations``. TensorRT only: TensorRT for
RTX has no plugins.
"""

import numpy as np

from ddtree.plugins.operations import BUILD_TREE, DRAFT_TOPK, VERIFY_TREE, mask_words

from .compile import Network, Profile
from .errors import BuildError
from .manifest import DraftInfo

DIMENSIONS = {"B": "batch", "N": "rows", "M": "bitmask_words", "C": "coins"}  # the table's names -> the engine's


def register(arch: str) -> None:
    """Make the plugins known to TensorRT, with kernels for ``arch``. Before a network is made.

    Raises:
        BuildError: this TensorRT or NumPy cannot have them.
    """
    try:
        from ddtree.plugins import tensorrt

        tensorrt.register(arch=arch)
    except (ImportError, RuntimeError, ValueError) as error:
        raise BuildError(f"verify 'plugin' cannot be built: {error} (or use --verify kernel)") from error


def add_build_tree(network: Network, draft: DraftInfo, budget: int, draft_to_target: np.ndarray | None) -> None:
    """Take in root_token_ids int32 [batch]; give the fields of DraftTree, of ``budget`` nodes, beside draft_logits,
    which a chain is made of.

    Args:
        draft_to_target: int32 [draft vocabulary], or None where the ids are the target's.
    """
    from ddtree.plugins import tensorrt

    if draft_to_target is None:
        table = network.input("draft_to_target", "int32", ["mapped_vocab"])  # of no elements, which no constant has
    else:
        table = network.constant(draft_to_target)
    logits = network.tensor("draft_logits")
    k = min(budget, draft.vocab_size)
    topk = tensorrt.add_layer(network.definition, DRAFT_TOPK.name, [logits, table], k=k)
    roots = network.input("root_token_ids", "int32", ["batch"])
    tree = tensorrt.add_layer(
        network.definition,
        BUILD_TREE.name,
        [topk.get_output(0), topk.get_output(1), roots],
        budget=budget,
        mode="tree",
        keep_chain=0,
    )
    for index, spec in enumerate(BUILD_TREE.outputs):
        network.output(tree.get_output(index), spec.name)


def add_verify_tree(network: Network, max_depth: int) -> None:
    """Take in the tree and the sampling settings; give the fields of Verified, beside the logits.

    Args:
        max_depth: D; 1 without a drafter.
    """
    from ddtree.plugins import tensorrt

    fixed = {"thresholds": np.ones(2, np.float32), "max_depth_shape": np.zeros(max_depth, np.int32)}
    inputs = [network.tensor("logits")]
    for spec in VERIFY_TREE.inputs[1:]:
        if spec.name in fixed:
            inputs.append(network.constant(fixed[spec.name]))
        else:
            inputs.append(
                network.input(spec.name, spec.dtype, [DIMENSIONS.get(name, name) for name in spec.dimensions])
            )
    verified = tensorrt.add_layer(network.definition, VERIFY_TREE.name, inputs, method="coupled")
    for index, spec in enumerate(VERIFY_TREE.outputs):
        network.output(verified.get_output(index), spec.name)


def ranges(vocab_size: int) -> Profile:
    """The ranges of the dimensions that the operations add: a grammar's bitmask may be there or not, coins are of the
    method target_only, which engines are not built for, and a table of ids that is there is a constant."""
    words = mask_words(vocab_size)
    return {"bitmask_words": (0, 0, words), "coins": (0, 0, 0), "final_coins": (0, 0, 0), "mapped_vocab": (0, 0, 0)}
