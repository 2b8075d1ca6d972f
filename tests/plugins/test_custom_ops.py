"""torch.compile, torch.export and fake tensors take the operations, and what they make does what the operations do."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ddtree.plugins import custom_ops, ops, reference

from .oracles import sampling

B, D, V, BUDGET = 2, 4, 40, 12
PAST = torch.tensor([5, 9])
SAMPLING = sampling([{"seed": 1}, {"temperature": 0.0}])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def liked(tree: ops.DraftTree) -> torch.Tensor:
    """Target logits [B, N, V] that accept the last child of the root, whose rows have to move."""
    last = [int((parents == 0).nonzero()[-1]) for parents in tree.parents]
    tokens = tree.token_ids[torch.arange(B), last].long()
    return random(B, BUDGET + 1, V, seed=1) + 20 * torch.nn.functional.one_hot(tokens, V)[:, None]


TREE = ops.build_tree(random(B, D, V), torch.arange(B), budget=BUDGET)
LOGITS = liked(TREE)
VERIFIED = ops.verify_tree(LOGITS, TREE, PAST, SAMPLING)
ACCEPTED = (VERIFIED.accepted_nodes, VERIFIED.accepted_count)
TREE_TENSORS, SAMPLING_TENSORS = list(custom_ops.tree_tensors(TREE)), custom_ops.sampling_tensors(SAMPLING)
GRAMMAR = torch.full((B, BUDGET + 1, 2), -2, dtype=torch.int32)  # not token 0, not token 32
TARGET_ONLY_INPUTS = (GRAMMAR, torch.full((B, BUDGET + 1), 0.4), torch.full((B,), 0.7))  # and coins

CALLS = {
    "build_tree": (custom_ops.build_tree, (random(B, D, V), torch.arange(B), None, BUDGET, "tree", False)),
    "build_tree of draft ids": (
        custom_ops.build_tree,
        (random(B, D, V).half(), torch.arange(B).int(), torch.arange(V).int() // 2, 40, "tree", True),
    ),
    "encode_tree": (custom_ops.encode_tree, (TREE_TENSORS, PAST, PAST, 32, torch.bfloat16, None)),
    "encode_tree of a window": (custom_ops.encode_tree, (TREE_TENSORS, PAST, PAST, 32, torch.float32, 3)),
    "verify_tree": (
        custom_ops.verify_tree,
        (LOGITS, TREE_TENSORS, PAST, SAMPLING_TENSORS, None, None, None, D, "coupled", 1.0, 1.0),
    ),
    "verify_tree of all inputs": (
        custom_ops.verify_tree,
        (LOGITS.bfloat16(), TREE_TENSORS, PAST, SAMPLING_TENSORS, *TARGET_ONLY_INPUTS, D, "target_only", 0.5, 0.5),
    ),
    "commit": (custom_ops.commit, ([random(B, 2, 32, 4, seed=s) for s in range(4)], PAST, *ACCEPTED)),
    "commit_paged": (
        custom_ops.commit_paged,
        ([random(9, 2, 8, 4, seed=s) for s in range(4)], torch.randperm(8).view(B, 4).int(), PAST, *ACCEPTED),
    ),
    "gather_features": (custom_ops.gather_features, (random(B, BUDGET + 1, 6).half(), *ACCEPTED)),
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_keep_torchs_rules(name):
    """Schema, mutation and aliasing as declared, fake results like the real ones, and tracing with dynamic shapes."""
    operator, arguments = CALLS[name]
    torch.library.opcheck(operator, arguments)


def test_a_fake_result_of_another_shape_would_be_noticed():
    @torch.library.custom_op("ddtree_test::gather", mutates_args=(), device_types="cpu")
    def gather(features: torch.Tensor, nodes: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return custom_ops.gather_features(features, nodes, count)

    @gather.register_fake
    def _(features, nodes, count):
        return features.new_empty(features.shape)

    with pytest.raises(Exception, match="opcheck"):
        torch.library.opcheck(gather, CALLS["gather_features"][1])


def tree_round(draft_logits, roots, past, logits, keys, values, features):
    """All operations, by their public names."""
    tree = ops.build_tree(draft_logits, roots, budget=BUDGET)
    position_ids, mask = ops.encode_tree(tree, past, past, keys.shape[2], torch.float32, window=9)
    verified = ops.verify_tree(logits, tree, past, SAMPLING)
    ops.commit([(keys, values)], past, verified)
    return position_ids, mask, verified.output_ids, verified.logprobs, ops.gather_features(features, verified)


def round_inputs(seed: int) -> list[torch.Tensor]:
    caches = [random(B, 2, 32, 4, seed=seed + 1), random(B, 2, 32, 4, seed=seed + 2)]
    drafts = random(B, D, V, seed=seed)
    tree = reference.build_tree(drafts, torch.arange(B), budget=BUDGET)
    return [drafts, torch.arange(B), PAST.clone(), liked(tree), *caches, random(B, BUDGET + 1, 6, seed=seed)]


class Round(torch.nn.Module):
    def forward(self, *inputs):
        return tree_round(*inputs)


def assert_rounds_equal(run) -> None:
    for seed in (10, 20):
        inputs, expected_inputs = round_inputs(seed), round_inputs(seed)
        results, expected = run(*inputs), tree_round(*expected_inputs)
        for have, want in zip((*results, *inputs), (*expected, *expected_inputs), strict=True):
            assert torch.equal(have, want)
        assert not torch.equal(inputs[4], round_inputs(seed)[4])  # a row has moved


def test_torch_compile_takes_a_round_whole():
    """fullgraph: a graph break is an error."""
    assert_rounds_equal(torch.compile(tree_round, backend="aot_eager", fullgraph=True))


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_takes_a_round_whole(strict):
    exported = torch.export.export(Round(), tuple(round_inputs(1)), strict=strict)
    names = {node.target.name() for node in exported.graph.nodes if hasattr(node.target, "name")}
    assert {f"ddtree::{name}" for name in ("build_tree", "encode_tree", "verify_tree", "gather_features")} <= names
    assert_rounds_equal(exported.module())


def test_an_exported_tree_takes_another_batch():
    class Build(torch.nn.Module):
        def forward(self, draft_logits, roots):
            tree = ops.build_tree(draft_logits, roots, budget=BUDGET)
            return tree.token_ids, tree.ancestor_mask

    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {"draft_logits": {0: batch}, "roots": {0: batch}}
    exported = torch.export.export(Build(), (random(2, D, V), torch.arange(2)), dynamic_shapes=shapes).module()
    for size in (2, 5):
        drafts, roots = random(size, D, V), torch.arange(size)
        expected = ops.build_tree(drafts, roots, budget=BUDGET)
        tokens, mask = exported(drafts, roots)
        assert torch.equal(tokens, expected.token_ids)
        assert torch.equal(mask, expected.ancestor_mask)


def test_fake_tensors_give_fake_trees():
    with FakeTensorMode() as mode:
        tree = ops.build_tree(mode.from_tensor(random(B, D, V)), mode.from_tensor(torch.arange(B)), budget=BUDGET)
        for field in dataclasses.fields(tree)[:-1]:
            have, want = getattr(tree, field.name), getattr(TREE, field.name)
            assert (have.shape, have.dtype) == (want.shape, want.dtype), field.name


def test_plain_calls_on_a_cpu_do_not_pass_through_an_operator(monkeypatch):
    """That would cost a tiny call a large part of its time."""

    def refuse(*_):
        raise AssertionError("an operator was called")

    for name in ("build_tree", "encode_tree", "verify_tree", "commit", "gather_features"):
        monkeypatch.setattr(custom_ops, name, refuse)
    tree_round(*round_inputs(3))
