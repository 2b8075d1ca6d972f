"""The table of the tree operations that kernels compute: inputs, outputs, shapes, types, scalars and launch geometry.

``ops``, both TensorRT faces and the tests read it; nothing restates it. A kernel's parameters are its inputs, its
scalars (int32) and its outputs, in the order of the table, each tensor contiguous.

A shape is written as the names of its sizes, ``"B N V"``. What a name stands for comes from the shapes of the inputs,
from the attributes (fixed when a graph is made) and from the formulas. A formula uses + - * // alone, so it computes
with numbers and with TensorRT's symbolic sizes alike.

    B  batch                     N  rows of the tree, budget + 1       V  vocabulary
    D  depths of the draft       K  candidates a depth, min(budget, V) W  words of an ancestor mask, ceil(N / 32)
    M  words of token_bitmask, ceil(V / 32)                            P  outputs a slot, D + 1
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

MODES = ("tree", "chain")
METHODS = ("coupled", "greedy", "target_only")
LOGIT_TYPES = ("float32", "float16", "bfloat16")

MAX_BUDGET = 1023  # N = 1024 nodes is what a block of build_tree keeps in shared memory
MAX_CHAIN = 32  # depths of a chain that build_tree can keep: one a lane of a warp
MAX_SHARED_BYTES = 48 << 10  # what a launch may use without opting in; a TensorRT AOT plugin has no way to opt in

Formula = Callable[[Any], Any]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor parameter of a kernel. ``dtype`` "T" is one of ``Operation.types``: that of the logits or the mask."""

    name: str
    dtype: str
    shape: str  # names or numbers, separated by blanks

    @property
    def dimensions(self) -> list[str]:
        return self.shape.split()


@dataclass(frozen=True)
class Attribute:
    """A setting that is fixed when a graph is made: a word of ``choices``, or an integer within the limits.

    To the kernel, and in a TensorRT plugin, a word is its index in ``choices``.
    """

    name: str
    choices: tuple[str, ...] = ()
    lowest: int = 0
    highest: int = 2**31 - 1

    def number(self, value: int | str) -> int:
        """``value`` as an int32 scalar; a ValueError or TypeError where it is not allowed."""
        if isinstance(value, str) and self.choices:
            if value not in self.choices:
                raise ValueError(f'{self.name} "{value}" is unknown (one of {", ".join(self.choices)})')
            return self.choices.index(value)
        if not isinstance(value, int):
            raise TypeError(f"{self.name} is {value!r}, expected an integer")
        highest = len(self.choices) - 1 if self.choices else self.highest
        if not self.lowest <= value <= highest:
            raise ValueError(f"{self.name} {value} is outside {self.lowest} to {highest}")
        return int(value)


@dataclass(frozen=True)
class Operation:
    """One kernel launch. ``attributes`` and ``formulas`` give the sizes that the shapes of the inputs do not."""

    name: str
    source: str  # file in plugins/kernels
    inputs: tuple[TensorSpec, ...]
    scalars: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    grid: tuple[Formula, Formula]  # blocks in x and y
    block: int  # threads, also the kernel's __launch_bounds__
    shared_bytes: Formula = field(default=lambda s: 0)  # dynamic shared memory
    attributes: tuple[Attribute, ...] = ()
    formulas: Mapping[str, Formula] = field(default_factory=dict)
    unused_or: Mapping[str, str] = field(default_factory=dict)  # sizes that are 0, tensor not used, or equal another
    types: tuple[str, ...] = ()  # what T may be; none: one kernel for all
    refusal: Callable[[SimpleNamespace], str | None] = field(default=lambda s: None)  # why the kernel can't serve sizes

    def entry(self, dtype: str | None = None) -> str:
        """Name of the kernel in which T is ``dtype``."""
        if not self.types:
            return f"ddtree_{self.name}"
        if dtype not in self.types:
            raise ValueError(f"{self.name} of {dtype}, expected {' or '.join(self.types)}")
        return f"ddtree_{self.name}_{dtype}"

    @property
    def attribute_names(self) -> list[str]:
        return [attribute.name for attribute in self.attributes]

    def attribute_numbers(self, attributes: Mapping[str, int | str]) -> dict[str, int]:
        """Each attribute as the kernel's int32; a one-line error where one is missing, unknown or not allowed."""
        if sorted(attributes) != sorted(self.attribute_names):
            have, wanted = ", ".join(attributes) or "none", ", ".join(self.attribute_names) or "none"
            raise TypeError(f"{self.name} has attributes {wanted}, got {have}")
        return {each.name: each.number(attributes[each.name]) for each in self.attributes}

    def sizes(self, shapes: Sequence[Sequence[Any]], **attributes: int | str) -> SimpleNamespace:
        """What each name of this operation stands for, given the shapes of its inputs and its attributes.

        Sizes that are integers are checked: a ValueError names the input. Symbolic ones are taken as they are.
        """
        known: dict[str, Any] = self.attribute_numbers(attributes)
        for spec, shape in zip(self.inputs, shapes, strict=True):
            if len(shape) != len(spec.dimensions):
                raise ValueError(f"{spec.name} has shape {list(shape)}, expected [{', '.join(spec.dimensions)}]")
            for name, size in zip(spec.dimensions, shape, strict=True):
                if name.isdigit():
                    _check_size(spec, shape, size, int(name))
                elif name in known:
                    _check_size(spec, shape, size, known[name])
                elif isinstance(size, int) and size < 1 and name not in self.unused_or:
                    raise ValueError(f"{spec.name} has shape {list(shape)}: {name} is {size}, expected 1 or more")
                else:
                    known[name] = size
        sizes = SimpleNamespace(**known)
        for name, formula in self.formulas.items():
            setattr(sizes, name, formula(sizes))
        for spec, shape in zip(self.inputs, shapes, strict=True):
            for name, size in zip(spec.dimensions, shape, strict=True):
                if name in self.unused_or and isinstance(size, int) and size > 0:
                    _check_size(spec, shape, size, getattr(sizes, self.unused_or[name]))
        if refusal := self.refusal(sizes):
            raise ValueError(refusal)
        return sizes

    def output_shapes(self, sizes: SimpleNamespace) -> list[tuple[Any, ...]]:
        return [
            tuple(int(name) if name.isdigit() else getattr(sizes, name) for name in spec.dimensions)
            for spec in self.outputs
        ]

    def scalar_values(self, sizes: SimpleNamespace) -> list[Any]:
        return [getattr(sizes, name) for name in self.scalars]


def _check_size(spec: TensorSpec, shape: Sequence[Any], size: Any, expected: Any) -> None:
    if isinstance(size, int) and isinstance(expected, int) and size != expected:
        raise ValueError(f"{spec.name} has shape {list(shape)}: {size} is not the {expected} of the other arguments")


def mask_words(bits: Any) -> Any:
    """int32 words that hold so many bits."""
    return (bits + 31) // 32


def _chain_too_long(s: SimpleNamespace) -> str | None:
    if s.keep_chain and isinstance(s.D, int) and s.D > MAX_CHAIN:
        return f"keep_chain with D {s.D} exceeds the {MAX_CHAIN} depths of the kernel (leave keep_chain out)"
    return None


def _too_many_nodes(s: SimpleNamespace) -> str | None:
    if isinstance(s.N, int) and s.N > MAX_BUDGET + 1:
        return f"a tree of {s.N - 1} draft nodes exceeds the {MAX_BUDGET} of the kernel (lower the budget)"
    return None


_T = TensorSpec

DRAFT_TOPK = Operation(
    name="draft_topk",
    source="draft_topk.cu",
    attributes=(Attribute("k", lowest=1, highest=MAX_BUDGET),),
    inputs=(
        _T("draft_logits", "T", "B D V"),
        _T("draft_to_target", "int32", "mapped_vocab"),
    ),
    scalars=("D", "V", "K", "mapped"),
    outputs=(
        _T("token_ids", "int32", "B D K"),  # best first, ties by the lower id; padding -1
        _T("log_probs", "float32", "B D K"),  # over the whole vocabulary; padding -inf
    ),
    unused_or={"mapped_vocab": "V"},
    formulas={"K": lambda s: s.k, "mapped": lambda s: s.mapped_vocab // s.V},
    grid=(lambda s: s.B * s.D, lambda s: 1),
    block=1024,
    types=LOGIT_TYPES,
)

BUILD_TREE = Operation(
    name="build_tree",
    source="build_tree.cu",
    attributes=(
        Attribute("budget", lowest=1, highest=MAX_BUDGET),
        Attribute("mode", choices=MODES),
        Attribute("keep_chain", highest=1),
    ),
    inputs=(
        _T("token_ids", "int32", "B D K"),
        _T("log_probs", "float32", "B D K"),
        _T("root_token_ids", "int32", "B"),
    ),
    scalars=("D", "K", "N", "mode", "keep_chain"),
    outputs=(
        _T("token_ids", "int32", "B N"),
        _T("parents", "int32", "B N"),
        _T("depths", "int32", "B N"),
        _T("node_logws", "float32", "B N"),
        _T("node_count", "int32", "B"),
        _T("next_token", "int32", "B N"),
        _T("next_sibling", "int32", "B N"),
        _T("ancestor_mask", "int32", "B N W"),
    ),
    formulas={"N": lambda s: s.budget + 1, "W": lambda s: mask_words(s.N)},
    refusal=_chain_too_long,
    grid=(lambda s: s.B, lambda s: 1),
    block=512,
)

ENCODE_TREE = Operation(
    name="encode_tree",
    source="encode_tree.cu",
    attributes=(Attribute("cache_length", lowest=1), Attribute("window")),
    inputs=(
        _T("depths", "int32", "B N"),
        _T("ancestor_mask", "int32", "B N W"),
        _T("root_positions", "int64", "B"),
        _T("past_lengths", "int64", "B"),
    ),
    scalars=("N", "W", "cache_length", "window"),
    outputs=(
        _T("position_ids", "int64", "B N"),
        _T("attention_mask", "T", "B 1 N cache_length"),
    ),
    grid=(lambda s: s.N, lambda s: s.B),
    block=256,
    types=LOGIT_TYPES,
)

VERIFY_TREE = Operation(
    name="verify_tree",
    source="verify_tree.cu",
    attributes=(Attribute("method", choices=METHODS),),
    inputs=(
        _T("logits", "T", "B N V"),
        _T("token_ids", "int32", "B N"),
        _T("next_token", "int32", "B N"),
        _T("next_sibling", "int32", "B N"),
        _T("node_count", "int32", "B"),
        _T("root_positions", "int64", "B"),
        _T("temperature", "float32", "B"),
        _T("top_k", "int32", "B"),
        _T("top_p", "float32", "B"),
        _T("min_p", "float32", "B"),
        _T("seed", "int64", "B"),
        _T("token_bitmask", "int32", "B N M"),
        _T("coins", "float32", "B C"),
        _T("final_coin", "float32", "final_coins"),
        _T("thresholds", "float32", "2"),  # threshold_single, threshold_acc
        _T("max_depth_shape", "int32", "D"),  # its length says what D is; it is never read
    ),
    scalars=("N", "V", "D", "M", "C", "F", "method"),
    outputs=(
        _T("accepted_nodes", "int32", "B P"),
        _T("accepted_count", "int32", "B"),
        _T("output_ids", "int32", "B P"),
        _T("logprobs", "float32", "B P"),
        _T("status", "int32", "B"),
    ),
    unused_or={"M": "bitmask_words", "C": "N", "final_coins": "B"},
    formulas={
        "bitmask_words": lambda s: mask_words(s.V),
        "F": lambda s: s.final_coins // s.B,  # 1 where final_coin is given
        "P": lambda s: s.D + 1,
    },
    refusal=_too_many_nodes,
    grid=(lambda s: s.B, lambda s: 1),
    block=512,
    types=LOGIT_TYPES,
)

GATHER_FEATURES = Operation(
    name="gather_features",
    source="commit.cu",
    attributes=(Attribute("row_bytes", lowest=1),),
    inputs=(
        _T("features", "uint8", "B N row_bytes"),
        _T("accepted_nodes", "int32", "B P"),
        _T("accepted_count", "int32", "B"),
    ),
    scalars=("N", "D", "row_bytes"),
    outputs=(_T("gathered", "uint8", "B P row_bytes"),),
    formulas={"D": lambda s: s.P - 1},
    grid=(lambda s: s.P, lambda s: s.B),
    block=256,
)

COMMIT_LINEAR = Operation(
    name="commit_linear",
    source="commit.cu",
    attributes=(
        Attribute("kv_heads", lowest=1),
        Attribute("cache", lowest=1),
        Attribute("row_bytes", lowest=1),
    ),
    inputs=(
        _T("pointers", "int64", "tables"),  # device address of each layer's key and value cache
        _T("past_lengths", "int64", "B"),
        _T("accepted_nodes", "int32", "B P"),
        _T("accepted_count", "int32", "B"),
    ),
    scalars=("D", "kv_heads", "cache", "row_bytes"),
    outputs=(),
    formulas={"D": lambda s: s.P - 1},
    grid=(lambda s: s.B * s.kv_heads, lambda s: s.tables),
    block=32,
)

COMMIT_PAGED = Operation(
    name="commit_paged",
    source="commit.cu",
    attributes=(
        Attribute("pool_blocks", lowest=1),
        Attribute("kv_heads", lowest=1),
        Attribute("tokens_per_block", lowest=1),
        Attribute("row_bytes", lowest=1),
    ),
    inputs=(
        _T("pointers", "int64", "tables"),
        _T("block_table", "int32", "B blocks"),
        _T("past_lengths", "int64", "B"),
        _T("accepted_nodes", "int32", "B P"),
        _T("accepted_count", "int32", "B"),
    ),
    scalars=("D", "pool_blocks", "kv_heads", "tokens_per_block", "row_bytes", "blocks"),
    outputs=(),
    formulas={"D": lambda s: s.P - 1},
    grid=(lambda s: s.B * s.kv_heads, lambda s: s.tables),
    block=32,
)

OPERATIONS = {
    operation.name: operation
    for operation in (DRAFT_TOPK, BUILD_TREE, ENCODE_TREE, VERIFY_TREE, COMMIT_LINEAR, COMMIT_PAGED, GATHER_FEATURES)
}
