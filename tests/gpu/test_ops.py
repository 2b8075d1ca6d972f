"""The operations on a GPU against the CPU path. Each test also runs without a GPU, by the same calls, on the driver's
stand-in, which runs the kernels on the CPU."""

import pytest
import torch
from simt.driver import Driver, install

from ddtree.plugins import ops, reference

from ..plugins import oracles

NO_DEVICE = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=[pytest.mark.gpu, NO_DEVICE])])
def device(request, monkeypatch):
    """Where the tensors of the call under test are."""
    if request.param == "cuda":
        return torch.device("cuda")
    install(monkeypatch, Driver())
    return torch.device("cpu")


@pytest.fixture
def large(device):
    """A vocabulary: that of Qwen 3, where a device reads it."""
    return 151_936 if device.type == "cuda" else 1000


def moved(value, device):
    """A copy on ``device``, of a tensor or of a dataclass of tensors."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    fields = {
        name: moved(field, device) if isinstance(field, torch.Tensor) else field for name, field in vars(value).items()
    }
    return type(value)(**fields)


def separated(budget: int, **shape) -> tuple[torch.Tensor, ops.DraftTree]:
    """Draft logits, and a tree of them no two nodes of which are so near that the last bits of a log-probability, which
    differ between devices, decide their order."""
    for seed in range(100):
        logits = draft_logits(seed, **shape)
        tree = reference.build_tree(logits, torch.arange(len(logits)), budget=budget + 1)
        logws = tree.node_logws[:, 1:]
        gaps = (logws[:, :-1] - logws[:, 1:])[:, :budget]
        if (gaps > 1e-5).all():
            return logits, reference.build_tree(logits, torch.arange(len(logits)), budget=budget)
    raise AssertionError("no such logits")


def draft_logits(seed: int, *, batch: int, depth: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(batch * depth)])
    logits = -1.5 * torch.log1p(ranks.float()) + 0.5 * torch.randn(ranks.shape, generator=generator)
    return logits.view(batch, depth, vocab).to(dtype)


def assert_same_tree(have: ops.DraftTree, expected: ops.DraftTree) -> None:
    for name, field in vars(expected).items():
        got = getattr(have, name)
        if name == "node_logws":
            torch.testing.assert_close(got.cpu(), field, rtol=1e-5, atol=1e-5)
        elif isinstance(field, torch.Tensor):
            assert torch.equal(got.cpu(), field), name
        else:
            assert got == field


@pytest.mark.parametrize(
    ("dtype", "budget"), [(torch.float32, 1), (torch.float32, 60), (torch.float16, 8), (torch.bfloat16, 8)]
)
def test_build_tree(device, dtype, budget):
    logits, expected = separated(budget, batch=2, depth=5, vocab=90, dtype=dtype)
    tree = ops.build_tree(logits.to(device), torch.arange(2, device=device), budget=budget)
    assert_same_tree(tree, expected)


def test_build_tree_of_a_large_vocabulary(device, large):
    logits, expected = separated(200, batch=1, depth=3, vocab=large)
    assert_same_tree(ops.build_tree(logits.to(device), torch.arange(1, device=device), budget=200), expected)


@pytest.mark.parametrize(
    "options", [{"mode": "chain"}, {"keep_chain": True}, {"budget": 0}, {"budget": 3, "keep_chain": True}]
)
def test_build_tree_modes(device, options):
    options = {"budget": 8, **options}
    logits, _ = separated(9, batch=2, depth=6, vocab=40)
    expected = reference.build_tree(logits, torch.arange(2), **options)
    assert_same_tree(ops.build_tree(logits.to(device), torch.arange(2, device=device), **options), expected)


def test_build_tree_merges_draft_ids(device):
    logits, _ = separated(9, batch=2, depth=3, vocab=40)
    table = (torch.arange(40, dtype=torch.int32) * 7) % 33
    expected = reference.build_tree(logits, torch.arange(2), budget=9, draft_to_target=table)
    roots = torch.arange(2, dtype=torch.int32, device=device)
    assert_same_tree(ops.build_tree(logits.to(device), roots, budget=9, draft_to_target=table.to(device)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 4])
def test_encode_tree(device, dtype, window):
    _, tree = separated(40, batch=2, depth=5, vocab=60)
    past = torch.tensor([20, 3])
    expected = reference.encode_tree(tree, past, past, 67, dtype, window=window)
    there = past.to(device)
    positions, mask = ops.encode_tree(moved(tree, device), there, there, 67, dtype, window=window)
    assert torch.equal(positions.cpu(), expected[0])
    assert torch.equal(mask.cpu().view(torch.uint8), expected[1].view(torch.uint8))


SETTINGS = {
    "sampled and greedy": oracles.sampling([{"seed": 1}, {"temperature": 0.0}, {"temperature": 0.7, "seed": -5}]),
    "top_k": oracles.sampling([{"top_k": 3, "seed": 1}, {"top_k": 1}, {"top_k": 500, "seed": 9}]),
    "top_p": oracles.sampling([{"top_p": 0.8, "seed": 1}, {"top_p": 0.3}, {"top_p": 0.99, "temperature": 1.5}]),
    "min_p": oracles.sampling([{"min_p": 0.1, "seed": 1}, {"min_p": 0.5}, {"min_p": 0.01, "top_p": 0.9, "top_k": 20}]),
}


def target_logits(tree: ops.DraftTree, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """[batch, N, vocab]; the likeliest token after a node is mostly its first child's."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(*tree.token_ids.shape, vocab, generator=generator)
    children = tree.next_token.clamp(min=0).long()
    logits.scatter_add_(2, tree.token_ids.gather(1, children).long()[..., None], torch.full((*children.shape, 1), 9.0))
    return logits.to(dtype)


def assert_same_verified(have: ops.Verified, expected: ops.Verified) -> None:
    for name in ("accepted_nodes", "accepted_count", "output_ids", "status"):
        assert torch.equal(getattr(have, name).cpu(), getattr(expected, name)), name
    torch.testing.assert_close(have.logprobs.cpu(), expected.logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("filters", SETTINGS)
@pytest.mark.parametrize("method", ["coupled", "greedy", "target_only"])
def test_verify_tree(device, method, filters, dtype):
    _, tree = separated(12, batch=3, depth=4, vocab=300)
    logits, sampling, roots = target_logits(tree, 300, dtype), SETTINGS[filters], torch.tensor([7, 0, 90])
    expected = reference.verify_tree(logits, tree, roots, sampling, method=method)
    assert expected.accepted_count.sum() > 0
    inputs = [moved(value, device) for value in (logits, tree, roots, sampling)]
    assert_same_verified(ops.verify_tree(*inputs, method=method), expected)


def test_verify_tree_of_a_large_vocabulary(device, large):
    _, tree = separated(6, batch=1, depth=3, vocab=300)
    logits = target_logits(tree, large, torch.bfloat16)
    sampling, roots = oracles.sampling([{"seed": 4, "top_p": 0.95}]), torch.tensor([50])
    expected = reference.verify_tree(logits, tree, roots, sampling)
    inputs = [moved(value, device) for value in (logits, tree, roots, sampling)]
    assert_same_verified(ops.verify_tree(*inputs), expected)


def test_verify_tree_with_a_grammar_coins_and_thresholds(device):
    _, tree = separated(12, batch=2, depth=4, vocab=300)
    logits, roots = target_logits(tree, 300, torch.float32), torch.tensor([7, 0])
    sampling = oracles.sampling([{}, {"top_k": 9}])
    generator = torch.Generator().manual_seed(0)
    options = {
        "token_bitmask": torch.randint(-(2**31), 2**31 - 1, (2, 13, 10), dtype=torch.int32, generator=generator),
        "coins": torch.rand(2, 13, generator=generator) * 0.9 + 0.05,
        "final_coin": torch.tensor([0.3, 0.6]),
    }
    thresholds = {"method": "target_only", "threshold_single": 0.5, "threshold_acc": 0.7}
    expected = reference.verify_tree(logits, tree, roots, sampling, **options, **thresholds)
    inputs = [moved(value, device) for value in (logits, tree, roots, sampling)]
    there = {name: value.to(device) for name, value in options.items()}
    assert_same_verified(ops.verify_tree(*inputs, **there, **thresholds), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["coupled", "greedy", "target_only"])
def test_requests_with_row_rules_beside_others(device, method, dtype):
    """The host verifies the former, the kernel the latter; rows off the path are read by neither."""
    _, tree = separated(12, batch=4, depth=4, vocab=300)
    logits, roots = target_logits(tree, 300, dtype), torch.tensor([7, 0, 90, 5])
    sampling = oracles.sampling([{"seed": 1}, {"temperature": 0.0}, {"top_p": 0.9, "seed": 7}, {"top_k": 4}])
    likeliest = logits[:, 0].argmax(1).tolist()
    rules = [
        None,
        ops.RowRules(vocab_size=300, prompt_token_ids=[1], bad_words=[[likeliest[1]]]),
        ops.RowRules(vocab_size=300, prompt_token_ids=[1, 2], repetition_penalty=1.5, logit_bias={17: 12.0}),
        ops.RowRules(vocab_size=300, prompt_token_ids=[1], min_tokens=0, end_token_ids=[3]),  # changes nothing
    ]
    generator = torch.Generator().manual_seed(0)
    options = {
        "token_bitmask": torch.randint(-(2**31), 2**31 - 1, (4, 13, 10), dtype=torch.int32, generator=generator),
        "method": method,
    }
    if method == "target_only":
        options["coins"] = torch.rand(4, 13, generator=generator) * 0.9 + 0.05
        options["final_coin"] = torch.full((4,), 0.3)
    expected = reference.verify_tree(logits, tree, roots, sampling, row_rules=rules, **options)
    without = reference.verify_tree(logits, tree, roots, sampling, **options)
    assert not torch.equal(expected.output_ids[1], without.output_ids[1])
    for slot, nodes in enumerate(expected.accepted_nodes.tolist()):
        logits[slot, [node for node in range(13) if node not in nodes]] = torch.nan
    there = {name: moved(value, device) if name != "method" else value for name, value in options.items()}
    inputs = [moved(value, device) for value in (logits, tree, roots, sampling)]
    assert_same_verified(ops.verify_tree(*inputs, row_rules=rules, **there), expected)


def test_bad_data_is_the_status_of_its_request(device):
    _, tree = separated(12, batch=3, depth=4, vocab=300)
    logits, roots = target_logits(tree, 300, torch.float32), torch.tensor([7, 0, 90])
    logits[0, 0, 5] = torch.nan
    bitmask = torch.full((3, 13, 10), -1, dtype=torch.int32)
    bitmask[1] = 0
    sampling = oracles.sampling([{}, {}, {"seed": 2}])
    expected = reference.verify_tree(logits, tree, roots, sampling, token_bitmask=bitmask)
    assert expected.status.tolist() == [1, 2, 0]
    inputs = [moved(value, device) for value in (logits, tree, roots, sampling)]
    assert_same_verified(ops.verify_tree(*inputs, token_bitmask=bitmask.to(device)), expected)


def test_root_alone_is_a_plain_decoding_step(device):
    tree = ops.root_tree(torch.tensor([3, 4]))
    logits, roots = 2 * torch.randn(2, 1, 50), torch.tensor([5, 6])
    sampling = oracles.sampling([{"seed": 1}, {"seed": 2}])
    expected = reference.verify_tree(logits, tree, roots, sampling)
    inputs = [moved(value, device) for value in (logits, tree, roots, sampling)]
    verified = ops.verify_tree(*inputs)
    assert verified.output_ids.shape == (2, 1)
    assert_same_verified(verified, expected)


def accepted(paths: list[list[int]]) -> ops.Verified:
    """Of depth 7. An empty path is a slot that failed."""
    nodes = torch.tensor([path + [-1] * (8 - len(path)) for path in paths], dtype=torch.int32)
    counts = torch.tensor([max(len(path) - 1, 0) for path in paths], dtype=torch.int32)
    status = torch.tensor([0 if path else 1 for path in paths], dtype=torch.int32)
    return ops.Verified(nodes, counts, nodes, torch.zeros(nodes.shape), status)


PATHS = [[0, 2, 3, 4, 5, 6, 7, 8], [0, 5, 9, 20], [0], []]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
@pytest.mark.parametrize("head_dim", [128, 24, 3])
def test_commit(device, dtype, head_dim):
    generator = torch.Generator().manual_seed(0)
    caches = [torch.randint(100, (4, 2, 40, head_dim), generator=generator).to(dtype) for _ in range(4)]
    past, verified = torch.tensor([5, 0, 30, 9]), accepted(PATHS)
    there = [cache.to(device, copy=True) for cache in caches]
    reference.commit([*zip(caches[::2], caches[1::2], strict=True)], past, verified)
    ops.commit([*zip(there[::2], there[1::2], strict=True)], past.to(device), moved(verified, device))
    for cache, expected in zip(there, caches, strict=True):
        assert torch.equal(cache.cpu(), expected)


@pytest.mark.parametrize("page", [1, 7, 16])
def test_commit_paged(device, page):
    generator = torch.Generator().manual_seed(0)
    blocks = -(-40 // page)
    table = torch.randperm(4 * blocks + 3, generator=generator)[: 4 * blocks].view(4, blocks).int()
    pools = [torch.randn(4 * blocks + 3, 2, page, 64, generator=generator).bfloat16() for _ in range(4)]
    past, verified = torch.tensor([5, 0, 30, 9]), accepted(PATHS)
    there = [pool.to(device, copy=True) for pool in pools]
    layers, layers_there = (list(zip(each[::2], each[1::2], strict=True)) for each in (pools, there))
    reference.commit_paged(layers, table, past, verified)
    ops.commit(layers_there, past.to(device), moved(verified, device), block_table=table.to(device))
    for pool, expected in zip(there, pools, strict=True):
        assert torch.equal(pool.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [5, 64])
def test_gather_features(device, dtype, hidden):
    features = torch.randn(4, 21, hidden).to(dtype)
    expected = reference.gather_features(features, accepted(PATHS))
    gathered = ops.gather_features(features.to(device), moved(accepted(PATHS), device))
    assert torch.equal(gathered.cpu(), expected)


@pytest.mark.gpu
@NO_DEVICE
def test_a_round_replayed_from_a_cuda_graph():
    """Nothing waits for the host, and workspace is torch's: a graph takes the whole round, and follows its inputs."""
    device = torch.device("cuda")
    cases = [draft_logits(seed, batch=2, depth=6, vocab=5000) for seed in range(3)]
    drafts, roots = cases[0].to(device), torch.tensor([3, 4], device=device)
    past = torch.tensor([9, 20], device=device)
    sampling = moved(oracles.sampling([{"seed": 1}, {"temperature": 0.0}]), device)
    caches = [(torch.randn(2, 2, 64, 16, device=device), torch.randn(2, 2, 64, 16, device=device)) for _ in range(2)]
    features = torch.randn(2, 31, 8, device=device)

    def decode():
        tree = ops.build_tree(drafts, roots, budget=30)
        mask = ops.encode_tree(tree, past, past, 64, torch.float16)[1]
        logits = drafts.gather(1, tree.depths.clamp(max=5).long()[..., None].expand(-1, -1, 5000))
        verified = ops.verify_tree(logits, tree, past, sampling)
        ops.commit(caches, past, verified)
        return mask, verified, ops.gather_features(features, verified)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decode()  # compiles, loads, and makes the table of addresses
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode()
    for case in cases:
        drafts.copy_(case)
        before = [[cache.clone() for cache in pair] for pair in caches]
        graph.replay()
        replayed = [captured[0].clone(), moved(captured[1], "cpu"), captured[2].clone()]
        after = [[cache.clone() for cache in pair] for pair in caches]
        for pair, old in zip(caches, before, strict=True):
            for cache, content in zip(pair, old, strict=True):
                cache.copy_(content)
        mask, verified, gathered = decode()
        assert torch.equal(replayed[0], mask)
        assert torch.equal(replayed[1].output_ids, verified.output_ids.cpu())
        assert torch.equal(replayed[2], gathered)
        for pair, expected in zip(caches, after, strict=True):
            assert all(torch.equal(*each) for each in zip(pair, expected, strict=True))


@pytest.mark.parametrize("budget", [0, 5])
def test_results_have_the_strides_that_a_compiled_graph_is_told(device, budget):
    logits, _ = separated(5, batch=2, depth=3, vocab=40)
    roots = torch.arange(2, dtype=torch.int32)
    tree = ops.build_tree(moved(logits, device), moved(roots, device), budget=budget)
    root = ops.root_tree(moved(roots, device))
    positions = torch.zeros(2, dtype=torch.int64, device=device)
    verified = ops.verify_tree(
        torch.zeros(2, 1, 40, device=device),
        root,
        positions,
        moved(oracles.sampling([{"seed": 1}, {"seed": 2}]), device),
    )
    for result in (tree, verified):
        assert all(field.is_contiguous() for field in vars(result).values() if isinstance(field, torch.Tensor))
