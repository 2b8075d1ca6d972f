"""The verify_tree kernel gives what ``ops.verify_tree`` gives, reads what the design says, and does so in any order."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ddtree.plugins import ops, reference
from ddtree.plugins.operations import METHODS

from ..plugins import oracles
from ..plugins.oracles import sampling, stacked, tree_of
from .runner import SimtError, build, build_text
from .verify_kernel import THREADS, arguments, entry, verify_tree

NAN, INF = math.nan, math.inf
VECTORS = Path(__file__).parents[1] / "vectors"
TYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMES = ("accepted_nodes", "accepted_count", "output_ids", "status")
# Rows of V terms, summed in float32 in another order: the sums differ by less than this, relatively.
LOGPROB_ERROR = 1e-5

# One slot each, so that every batch mixes greedy, plain and filtered requests.
SLOTS = [
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 1.0},
    {"temperature": 0.4, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.7, "top_k": 1 << 20, "top_p": 0.3},
]


def case(seed: int, vocab: int, budget: int, dtype: torch.dtype, slots: list[dict], *, depth: int = 4):
    """Inputs of verify_tree in which the target agrees with the draft often enough for paths of every length."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(slots)
    draft = torch.randn(batch, depth, vocab, generator=generator) * 3
    roots = torch.randint(vocab, (batch,), generator=generator, dtype=torch.int32)
    tree = ops.build_tree(draft, roots, budget=budget)
    at = tree.depths.long().clamp(max=depth - 1)
    logits = torch.randn(batch, budget + 1, vocab, generator=generator) + 1.5 * draft[torch.arange(batch)[:, None], at]
    positions = torch.randint(10**6, (batch,), generator=generator)
    seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator).tolist()
    settings = sampling([{"seed": seed, **slot} for seed, slot in zip(seeds, slots, strict=True)])
    return (logits.to(dtype), tree, positions, settings), generator


def coins_for(generator: torch.Generator, batch: int, width: int) -> dict:
    return {
        "coins": torch.rand(batch, width, generator=generator),
        "final_coin": torch.rand(batch, generator=generator),
    }


def assert_agrees(got: ops.Verified, inputs: tuple, **options) -> None:
    expected = ops.verify_tree(*inputs, **options)
    differing = {
        name: (getattr(got, name) != getattr(expected, name)).reshape(len(inputs[0]), -1).any(1) for name in NAMES
    }
    for slot in torch.stack(list(differing.values())).any(0).nonzero().flatten().tolist():
        gap = decision_gap(got, expected, slot, inputs, **options)
        assert gap < 1e-4, f"slot {slot} differs, though its decision is {gap} from the other: {got}\n{expected}"
        EXEMPT.append(slot)
    COMPARED.append(len(inputs[0]))
    same = ~torch.stack(list(differing.values())).any(0)
    np.testing.assert_allclose(got.logprobs[same], expected.logprobs[same], rtol=1e-6, atol=LOGPROB_ERROR)


# Slots that differ where the design leaves the choice to the last bits; counted by the last test.
EXEMPT: list[int] = []
COMPARED: list[int] = []


def assert_same(got: ops.Verified, expected: ops.Verified) -> None:
    for name in NAMES:
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


def decision_gap(got: ops.Verified, expected: ops.Verified, slot: int, inputs: tuple, **options) -> float:
    """How near, in float64, the first decision in which two results differ is to going the other way."""
    logits, _, positions, settings = inputs
    at = int((got.output_ids[slot] != expected.output_ids[slot]).nonzero()[0])
    tokens = [int(got.output_ids[slot, at]), int(expected.output_ids[slot, at])]
    node = int(expected.accepted_nodes[slot, at])
    row = logits[slot, node].double()
    if options.get("token_bitmask") is not None:
        bits = np.unpackbits(options["token_bitmask"][slot, node].numpy().view(np.uint8), bitorder="little")
        row[torch.from_numpy(bits[: row.numel()] == 0)] = -INF
    temperature = float(settings.temperature[slot])
    if temperature < 1e-5 or options.get("method") == "greedy" or min(tokens) < 0:
        return INF
    names = ("top_k", "top_p", "min_p")
    top_k, top_p, min_p = (getattr(settings, name)[slot].item() for name in names)
    kept = oracles.kept_probabilities(row.tolist(), temperature, top_k)
    order = sorted(kept.values(), reverse=True)
    gaps = [abs(mass - top_p) for mass in np.cumsum(order)] if top_p < 1 else []
    gaps += [abs(p / order[0] - min_p) for p in order] if min_p > 0 else []
    if options.get("method") == "target_only":
        return INF  # its coins are drawn so that no case is near
    seed, position = int(settings.seed[slot]), int(positions[slot]) + at + 1
    keys = [row[token].item() / temperature + oracles.gumbel(seed, position, token) for token in tokens]
    return min([*gaps, abs(keys[0] - keys[1])])


# ---------------------------------------------------------------------------------------------------------------------
# Equality
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [0, 1, 7, 64])
@pytest.mark.parametrize("vocab", [17, 100, 1000])
def test_it_equals_the_reference(vocab, budget, method):
    dtype = TYPES[(vocab + budget) % 3]
    inputs, generator = case(vocab * budget, vocab, budget, dtype, SLOTS)
    options = {"method": method}
    if budget == 7:
        shape = (len(SLOTS), budget + 1, -(-vocab // 32))
        options["token_bitmask"] = torch.randint(-(2**31), 2**31, shape, generator=generator).int()
    assert_agrees(verify_tree(*inputs, **options), inputs, **options)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("method", ["coupled", "target_only"])
def test_it_equals_the_reference_in_each_dtype(dtype, method):
    """Of 16-bit logits many are equal: ties at the cuts of top_k and top_p."""
    inputs, _ = case(5, 4099, 12, dtype, SLOTS)
    inputs = (inputs[0].mul(4).round().div(4), *inputs[1:])
    assert_agrees(verify_tree(*inputs, method=method), inputs, method=method)


@pytest.mark.parametrize("dtype", TYPES)
def test_it_equals_the_reference_over_32000_tokens(dtype):
    inputs, _ = case(1, 32000, 7, dtype, [SLOTS[1], SLOTS[5]])
    assert_agrees(verify_tree(*inputs), inputs)


@pytest.mark.parametrize("slot", [0, 1, 5])
def test_it_equals_the_reference_over_151936_tokens(slot):
    inputs, _ = case(2, 151936, 3, torch.bfloat16, [SLOTS[slot]])
    assert_agrees(verify_tree(*inputs), inputs)


def test_an_odd_vocabulary_of_151937_tokens():
    inputs, _ = case(3, 151937, 1, torch.float32, [SLOTS[5]])
    assert_agrees(verify_tree(*inputs), inputs)


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.3, 1.0), (1.0, 0.5), (0.2, 0.7), (0.0, 0.0)])
@pytest.mark.parametrize("given", ["coins", "final_coin", "both", "none"])
def test_target_only_with_coins_and_thresholds(given, thresholds):
    inputs, generator = case(11, 60, 20, torch.float32, SLOTS)
    coins = coins_for(generator, len(SLOTS), 21)
    options = {name: value for name, value in coins.items() if given in (name, "both")}
    options |= {"threshold_single": thresholds[0], "threshold_acc": thresholds[1], "method": "target_only"}
    assert_agrees(verify_tree(*inputs, **options), inputs, **options)


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 0.05, 100.0])
def test_extreme_temperatures(temperature):
    """At temperature 0.001 keys are so large that their difference is lost, unless it is that of the logits."""
    inputs, _ = case(7, 200, 10, torch.float16, [{"temperature": temperature, "top_p": p} for p in (1.0, 0.9)] * 4)
    inputs = (inputs[0].mul(100).clamp(-3e4, 3e4), *inputs[1:])
    assert_agrees(verify_tree(*inputs), inputs)


@pytest.mark.parametrize("slot", SLOTS[1:])
def test_logits_of_minus_infinity_and_of_the_lowest_finite_value_are_never_drawn(slot):
    inputs, _ = case(8, 130, 6, torch.float32, [slot] * 3)
    inputs[0][:, :, ::2] = -INF
    inputs[0][:, :, 1::4] = torch.finfo(torch.float32).min
    for method in ("coupled", "target_only"):
        got = verify_tree(*inputs, method=method)
        assert_agrees(got, inputs, method=method)
        assert (got.output_ids[:, 0] % 4 == 3).all()


@pytest.mark.parametrize("filters", [{"top_k": 7}, {"top_p": 0.5}, {"top_k": 9, "top_p": 0.4}, {"top_p": 1e-9}])
@pytest.mark.parametrize("method", ["coupled", "target_only"])
def test_of_equal_logits_the_lower_ids_are_kept(filters, method):
    """Ties of 40 tokens, scattered over a vocabulary of several steps of the block, and signed zeros among them."""
    vocab, batch = 3 * 8 * THREADS + 5, 12
    logits = torch.full((batch, 1, vocab), -9.0)
    tied = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:40].sort().values
    logits[:, 0, tied] = 0.0
    logits[:, 0, tied[::2]] = -0.0
    root = ops.root_tree(torch.zeros(batch, dtype=torch.int32))
    settings = sampling([{"seed": seed, **filters} for seed in range(batch)])
    inputs = (logits, root, torch.zeros(batch, dtype=torch.int64), settings)
    got = verify_tree(*inputs, method=method)
    assert_agrees(got, inputs, method=method)
    most = filters.get("top_k", 40)
    assert set(got.output_ids.flatten().tolist()) <= set(tied[:most].tolist())


def test_a_node_of_many_children():
    """1,000 children of the root, the one that is drawn among the last."""
    vocab = 1024
    tree = tree_of([0, *range(1, 1001)], [-1] + [0] * 1000, max_depth=2)
    logits = torch.zeros(1, 1001, vocab)
    logits[0, 0, 990:] = 6.0
    for method in METHODS:
        inputs = (logits, tree, torch.tensor([5]), sampling([{"seed": 3}]))
        assert_agrees(verify_tree(*inputs, method=method), inputs, method=method)


def test_hundreds_of_rejected_children_are_left_out():
    """Children in any order of ids, all rejected: the draw is from the tokens between them."""
    children = torch.randperm(1024, generator=torch.Generator().manual_seed(0))[:700].tolist()
    tree = tree_of([0, *children], [-1] + [0] * 700, max_depth=2)
    logits = torch.randn(1, 701, 1024, generator=torch.Generator().manual_seed(1))
    logits[..., children] -= 8
    inputs = (logits, tree, torch.tensor([5]), sampling([{}]))
    for final in (0.0, 0.2, 0.5, 0.8, 1.0):
        options = {"coins": torch.full((1, 701), 0.999), "final_coin": torch.tensor([final]), "method": "target_only"}
        got = verify_tree(*inputs, **options)
        assert_agrees(got, inputs, **options)
        assert got.accepted_count.tolist() == [0]
        assert int(got.output_ids[0, 0]) not in children


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("node", "emitted"), [(0, 0), (1, 1), (3, 2), (2, 3)])
def test_a_row_that_fails_ends_the_round_before_it(method, temperature, node, emitted):
    """Rows of NaN, of no finite logit, and of a mask that allows nothing, on the path 0, 1, 3 and off it."""
    tree = tree_of([9, 1, 2, 3], [-1, 0, 0, 1], max_depth=2)
    logits = torch.randn(4, 4, 50, generator=torch.Generator().manual_seed(2))
    for row, token in ((0, 1), (1, 3), (3, 0)):
        logits[:, row, token] += 400
    mask = torch.full((4, 4, 2), -1, dtype=torch.int32)
    logits[1, node], logits[2, node], mask[3, node] = NAN, -INF, 0
    inputs = (logits, stacked([tree] * 4), torch.full((4,), 5), sampling([{"temperature": temperature, "seed": 3}] * 4))
    got = verify_tree(*inputs, method=method, token_bitmask=mask)
    expected = reference.verify_tree(*inputs, method=method, token_bitmask=mask)
    for name in NAMES:
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert got.status.tolist() == ([0, 1, 1, 2] if emitted == 0 else [0] * 4)
    assert (got.output_ids >= 0).sum(1).tolist() == [3, *[emitted] * 3]


@pytest.mark.parametrize("links", [[1, 1, 1, 1], [9, -7, 1 << 30, 2]], ids=["a ring", "outside"])
def test_links_that_are_no_tree_end_the_walk(links):
    """Not an answer, but no endless loop and no access outside."""
    tree = tree_of([9, 1, 2, 3], [-1, 0, 0, 1], max_depth=2)
    tree.next_token[:] = torch.tensor([links])
    tree.next_sibling[:] = torch.tensor([links])
    for method in METHODS:
        verified = verify_tree(
            torch.zeros(1, 4, 50), tree, torch.tensor([5]), sampling([{}]), method=method, sanitize=True
        )
        assert verified.status.tolist() == [0]


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers
# ---------------------------------------------------------------------------------------------------------------------


def test_philox_and_the_noise_are_those_of_the_vectors():
    kernels = build_text("""
#include "common.cuh"
extern "C" __global__ void philox(const unsigned* in, unsigned* out) {
    const ddtree::Words4 words = ddtree::philox4x32_10({{in[0], in[1], in[2], in[3]}}, in[4], in[5]);
    for (int i = 0; i < 4; ++i) out[i] = words.word[i];
}
extern "C" __global__ void noise(const unsigned* words, float* uniforms, float* noises) {
    uniforms[threadIdx.x] = ddtree::uniform(words[threadIdx.x]);
    noises[threadIdx.x] = ddtree::gumbel(uniforms[threadIdx.x]);
}""")
    words = torch.zeros(4, dtype=torch.int32)

    def philox(counter, key):
        given = torch.from_numpy(np.array([*counter, *key], np.uint32).view(np.int32))
        kernels.launch("philox", grid=(1, 1, 1), block=(1, 1, 1), args=[given, words])
        return words.numpy().view(np.uint32).tolist()

    for vector in json.loads((VECTORS / "philox4x32_10.json").read_text()):
        assert philox(vector["counter"], vector["key"]) == vector["words"]
    for vector in json.loads((VECTORS / "gumbel.json").read_text()):
        key = [vector["seed"] & 0xFFFFFFFF, vector["seed"] >> 32 & 0xFFFFFFFF]
        uniforms, noises = torch.zeros(4), torch.zeros(4)
        for token, value in enumerate(vector["values"]):
            philox([token // 4, vector["position"], 0, 0], key)
            kernels.launch("noise", grid=(1, 1, 1), block=(4, 1, 1), args=[words, uniforms, noises])
            assert noises[token % 4].item() == pytest.approx(value, abs=1e-5)

    extremes = torch.tensor([0, 1, -1, 0x7FFFFFFF], dtype=torch.int32)
    kernels.launch("noise", grid=(1, 1, 1), block=(4, 1, 1), args=[extremes, uniforms, noises])
    assert uniforms.tolist() == [2.0**-33, 1.5 * 2.0**-32, 1 - 2.0**-24, 0.5]


def flat_case(slots: list[dict]) -> tuple:
    """Equal logits: which tokens a filter keeps is all ties, and the winner is the token of the largest noise."""
    batch = len(slots)
    root = ops.root_tree(torch.zeros(batch, dtype=torch.int32))
    settings = sampling([{"seed": seed, **slot} for seed, slot in enumerate(slots)])
    return torch.zeros(batch, 1, 5000), root, torch.arange(batch), settings


def test_pruning_by_bounds_loses_no_winner():
    inputs = flat_case([{"temperature": 0.5 + seed % 3} for seed in range(24)])
    assert_agrees(verify_tree(*inputs), inputs)


# ---------------------------------------------------------------------------------------------------------------------
# What is read, and in which order
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [96, 97, 98, 100])  # the rows' alignment is 16 bytes, that of an element, and between
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_filters_each_row_of_the_path_is_read_once_and_no_other(dtype, vocab):
    slots = [{"temperature": t} for t in (0.0, 0.5, 1.0)]
    inputs, _ = case(9, vocab, 12, dtype, slots)
    mask = torch.full((3, 13, -(-vocab // 32)), -1, dtype=torch.int32)
    args, verified = arguments(*inputs, token_bitmask=mask)
    kernels = build("verify_tree.cu", trace=True)
    reads = kernels.launch(entry(dtype), grid=(3, 1, 1), block=(THREADS, 1, 1), args=args, watch=inputs[0]).view(
        3, 13, -1
    )
    assert verified.accepted_count.max() >= 2
    for slot in range(3):
        path = verified.accepted_nodes[slot, : verified.accepted_count[slot] + 1].tolist()
        for node in range(13):
            assert (reads[slot, node] == (node in path)).all()
    assert reads.sum() == sum((count + 1) * vocab * dtype.itemsize for count in verified.accepted_count.tolist())


@pytest.mark.parametrize("method", ["coupled", "target_only"])
def test_with_filters_no_row_off_the_path_is_read(method):
    inputs, _ = case(10, 65, 9, torch.float16, SLOTS)
    args, verified = arguments(*inputs, method=method)
    kernels = build("verify_tree.cu", trace=True)
    options = {"grid": (len(SLOTS), 1, 1), "block": (THREADS, 1, 1), "args": args}
    reads = kernels.launch(entry(torch.float16), **options, watch=inputs[0]).view(len(SLOTS), 10, -1)
    for slot in range(len(SLOTS)):
        path = set(verified.accepted_nodes[slot].tolist())
        for node in range(10):
            assert (reads[slot, node] > 0).all() == (node in path)
            assert (reads[slot, node] > 0).any() == (node in path)


@pytest.mark.parametrize("method", METHODS)
def test_the_result_does_not_depend_on_the_schedule(method):
    inputs, _ = case(13, 500, 9, torch.bfloat16, SLOTS)
    in_order = verify_tree(*inputs, method=method)
    assert_agrees(in_order, inputs, method=method)
    for schedule in range(1, 6):
        shuffled = verify_tree(*inputs, method=method, schedule=schedule)
        for name in (*NAMES, "logprobs"):
            assert torch.equal(getattr(shuffled, name), getattr(in_order, name))


@pytest.mark.parametrize("method", ["coupled", "target_only"])
def test_no_thread_races_with_another(method):
    """Reads of a traced build fail where a barrier is missing, whatever the order."""
    inputs, _ = case(14, 300, 5, torch.bfloat16, [SLOTS[0], SLOTS[1], SLOTS[5]], depth=2)
    traced = verify_tree(*inputs, method=method, kernels=build("verify_tree.cu", trace=True), schedule=3)
    assert_agrees(traced, inputs, method=method)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", [17, 1003])
def test_under_the_address_sanitizer(vocab, dtype):
    for method in METHODS:
        inputs, generator = case(15, vocab, 5, dtype, [SLOTS[1], SLOTS[5]], depth=2)
        options = {"method": method, "token_bitmask": torch.full((2, 6, -(-vocab // 32)), -1, dtype=torch.int32)}
        if method == "target_only":
            options |= coins_for(generator, 2, 6)
        assert_agrees(verify_tree(*inputs, **options, sanitize=True), inputs, **options)


@pytest.mark.parametrize("slot", SLOTS)
def test_the_result_does_not_depend_on_where_a_row_lies(slot):
    """An odd vocabulary: the same row read in words of 16 bytes, and of 2. Bits of the log-probability included."""
    vocab = 1001
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(16)).mul(3).bfloat16()
    results = []
    for before in range(4):
        logits = torch.zeros(1, before + 1, vocab, dtype=torch.bfloat16)
        logits[0, before] = row
        logits[0, :before, 3] = 1e4  # along a chain to the row
        tree = tree_of([3] * (before + 1), list(range(-1, before)), max_depth=4)
        settings = sampling([{"seed": 4, **slot}])
        verified = verify_tree(logits, tree, torch.tensor([50 - before]), settings)
        assert verified.accepted_count.tolist() == [before]
        results.append((int(verified.output_ids[0, before]), float(verified.logprobs[0, before])))
    assert len(set(results)) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults
# ---------------------------------------------------------------------------------------------------------------------

# Faults are planted in the kernel for float32; the others are not compiled.
FLOAT32_ALONE = {"DDTREE_VERIFY_TREE(float16, __half)": "", "DDTREE_VERIFY_TREE(bfloat16, __nv_bfloat16)": ""}

BARRIERS = {
    "in a reduction, before the warps' values are read": (
        "partial[threadIdx.x / WARP] = value;\n    __syncthreads();",
        "partial[threadIdx.x / WARP] = value;",
    ),
    "in a reduction, before the next one": (
        "combine(value, partial[warp]);\n    __syncthreads();",
        "combine(value, partial[warp]);",
    ),
    "before the warps' masses are added": ("= up_to;\n        __syncthreads();", "= up_to;"),
    "after a token was found": (
        "running > threshold;\n            }\n        }\n        __syncthreads();",
        "running > threshold;\n            }\n        }",
    ),
    "after the children are listed": ("block_sort<THREADS>(rejected, rejected_count, 0x7fffffff);", ""),
}


@pytest.mark.parametrize(("old", "new"), BARRIERS.values(), ids=BARRIERS)
def test_a_missing_barrier_is_caught(old, new):
    faulty = build("verify_tree.cu", trace=True, replace={old: new, **FLOAT32_ALONE})
    inputs, _ = case(17, 40, 6, torch.float32, [{"temperature": 2.5, "top_k": 9}] * 2, depth=2)

    def verify_some():
        for seed in range(3):
            inputs[3].seed[:] = seed
            verify_tree(*inputs, method="target_only", kernels=faulty)

    with pytest.raises(SimtError, match="race"):
        verify_some()


ROWS = {
    "the row of the next node": ("(first_node + node) * V", "(first_node + node + 1) * V"),
    "the row of another slot": ("static_cast<long long>(slot) * N;", "static_cast<long long>(slot + 1) * N;"),
    "past the end of a row": ("if (left < CHUNK) {", "if (left <= 0) {"),
    "one output too many": ("at < outputs; at += THREADS", "at <= outputs; at += THREADS"),
}


@pytest.mark.parametrize(("old", "new"), ROWS.values(), ids=ROWS)
def test_an_access_outside_is_caught(old, new):
    faulty = build("verify_tree.cu", sanitize=True, replace={old: new, **FLOAT32_ALONE})
    inputs, _ = case(18, 19, 0, torch.float32, SLOTS[:1], depth=1)
    with pytest.raises(SimtError, match="AddressSanitizer: heap-buffer-overflow"):
        verify_tree(*inputs, kernels=faulty)


WRONG = {
    "the row of the parent": ("(first_node + node) * V", "(first_node + (node + 1) / 2) * V"),
    "top_k one too many": ("min(count - level", "min(count + 1 - level"),
    "the crossing token is dropped": ("tokens < 1 ? 1 :", "tokens <= 1 ? 0 :"),
    "higher ids win ties": ("token > last_at_cut", "token < last_at_cut"),
    "the position of the root": ("root_positions[slot] + emitted + 1", "root_positions[slot] + emitted"),
    "half of the seed": ("static_cast<unsigned>(seed[slot] >> 32)", "0u"),
    "a bound too tight": ("NOISE_PER_ZERO = 0.6932f", "NOISE_PER_ZERO = 0.3f"),
    "padding is accepted": ("node < count; }", "node < 100; }"),
}


@pytest.mark.parametrize(("old", "new"), WRONG.values(), ids=WRONG)
def test_a_wrong_result_is_caught(old, new):
    faulty = build("verify_tree.cu", replace={old: new, **FLOAT32_ALONE})

    def compare_some():
        flat = flat_case([{}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 9, "top_p": 0.4}] * 6)
        assert_same(verify_tree(*flat, kernels=faulty), ops.verify_tree(*flat))
        for seed in range(4):
            inputs, _ = case(seed, 50, 9, torch.float32, SLOTS)
            inputs[1].node_count[:] = 4  # the other nodes are padding now
            assert_same(verify_tree(*inputs, kernels=faulty), ops.verify_tree(*inputs))

    with pytest.raises(AssertionError):
        compare_some()


def test_few_slots_were_exempt():
    """Of those compared above: one in 200, and one."""
    assert len(EXEMPT) <= 1 + sum(COMPARED) // 200


def test_an_infinite_temperature_draws_a_token_as_the_reference_does():
    for slot in ({"temperature": INF}, {"temperature": INF, "top_p": 0.5}):
        inputs, _ = case(5, 100, 7, torch.float32, [slot, {"temperature": 1.0}])
        assert_agrees(verify_tree(*inputs), inputs)


def test_a_node_count_beyond_the_tree_reaches_no_other_request():
    (logits, tree, positions, settings), _ = case(6, 17, 7, torch.float32, [{"temperature": 0.0}] * 2)
    alone = verify_tree(logits, tree, positions, settings)
    tree.node_count[0] = 2**30
    tree.next_token[0][tree.next_token[0] < 0] = 9  # row 1 of the other request, were it followed
    together = verify_tree(logits, tree, positions, settings, sanitize=True)
    assert (together.accepted_nodes < 8).all()
    for name in NAMES:
        assert torch.equal(getattr(together, name)[1], getattr(alone, name)[1])


def test_more_rejected_children_than_a_tree_may_have_stay_inside_the_kernels_memory():
    budget, vocab = 1100, 1200
    tree = ops.build_tree(torch.zeros(1, 1, vocab), torch.zeros(1, dtype=torch.int32), budget=budget)
    logits = torch.full((1, budget + 1, vocab), -50.0)
    logits[0, 0, vocab - 1] = 0.0  # not a child: all children are rejected
    inputs = (logits, tree, torch.zeros(1, dtype=torch.int64), sampling([{"temperature": 1.0, "seed": 1}]))
    verify_tree(*inputs, method="target_only", sanitize=True)
