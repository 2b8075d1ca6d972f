"""The target graph in ONNX Runtime against transformers, which runs every sequence whole and without a cache.

A logit or feature may differ by 2e-5 of the largest one: seven times the worst seen (3e-6), far below what a wrong
position, mask, scale or cache row gives.
"""

from pathlib import Path

import numpy as np
import torch

from .models import CASES, LAYERS, LOWEST, VOCAB, GraphSession, Pair, make_pair

FEATURE_LAYERS = (0, 2)
TREE = [-1, 0, 0, 1, 1, 2, 3, 3, 5, 6, 6, 9]  # parents; depths 0 1 1 2 2 2 3 3 3 4 4 5
DEPTHS = [0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5]


class Sequences:
    """Passes of a target graph over sequences of different lengths, with masks written from their definition."""

    def __init__(self, pair: Pair, session: GraphSession, batch: int = 1):
        info = pair.manifest.target
        self.session, self.batch, self.window, self.mixed = session, batch, info.window, info.sliding_mask
        self.past = [0] * batch
        self.width = info.hidden_size * len(FEATURE_LAYERS)

    def run(self, ids: list[list[int]], parents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Logits [batch, seq, vocab] and features [batch, seq, width] of one pass.

        ``parents[b][i]`` is row i's parent row of sequence b; -1: the row follows the committed tokens. Sequences with
        fewer rows are padded with rows that see the committed tokens and themselves.
        """
        seq = max(map(len, ids))
        input_ids = np.zeros((self.batch, seq), np.int64)
        positions = np.zeros((self.batch, seq), np.int64)
        masks = np.full((2, self.batch, 1, seq, self.session.cache), LOWEST)  # full, windowed
        for b, (row_ids, row_parents) in enumerate(zip(ids, parents, strict=True)):
            past = self.past[b]
            slot_positions = dict(enumerate(range(past)))
            for i in range(seq):
                parent = row_parents[i] if i < len(row_ids) else -1
                lineage, node = [i], parent
                while node >= 0:
                    lineage.append(node)
                    node = row_parents[node]
                input_ids[b, i] = row_ids[i] if i < len(row_ids) else VOCAB - 1
                positions[b, i] = past + len(lineage) - 1
                slot_positions[past + i] = positions[b, i]
                for slot in [*range(past), *(past + row for row in lineage)]:
                    masks[0, b, 0, i, slot] = 0
                    if self.window and positions[b, i] - slot_positions[slot] < self.window:
                        masks[1, b, 0, i, slot] = 0
        windowed = self.window is not None
        inputs = {"attention_mask": masks[int(windowed and not self.mixed)]}
        if self.mixed:
            inputs["sliding_attention_mask"] = masks[1]
        logits, features = self.session.run(
            input_ids=input_ids,
            position_ids=positions,
            write_index=np.array(self.past),
            logit_rows=np.tile(np.arange(seq), (self.batch, 1)),
            **inputs,
        )
        return logits, features

    def commit(self, rows: list[list[int]]) -> None:
        """Keep these rows of the last pass: move their cache rows together behind the committed ones."""
        for b, kept in enumerate(rows):
            past = self.past[b]
            for cache in self.session.caches.values():
                cache[b, :, past : past + len(kept)] = cache[b, :, [past + row for row in kept]].transpose(1, 0, 2)
            self.past[b] += len(kept)


def chain(length: int) -> list[int]:
    return list(range(-1, length - 1))


def tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@torch.no_grad()
def reference(pair: Pair, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """transformers' logits [seq, vocab] and features [seq, width] of a whole sequence."""
    out = pair.target(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    features = torch.cat([out.hidden_states[layer + 1] for layer in FEATURE_LAYERS], -1)
    return out.logits[0].numpy(), features[0].numpy()


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    difference, scale = np.abs(ours - theirs).max(), np.abs(theirs).max()
    assert scale > 1
    assert difference <= 2e-5 * scale, f"largest difference {difference:.2e} at scale {scale:.1f}"


def check(pair: Pair, ours: tuple[np.ndarray, np.ndarray], b: int, rows: list[int], prefix: list[int], path: list[int]):
    """Rows ``rows`` of sequence b against transformers on prefix + path, whose last tokens they are."""
    logits, features = reference(pair, prefix + path)
    assert_close(ours[0][b, rows], logits[-len(rows) :])
    assert_close(ours[1][b, rows], features[-len(rows) :])


def path_to(node: int, parents: list[int]) -> list[int]:
    rows = []
    while node >= 0:
        rows.append(node)
        node = parents[node]
    return rows[::-1]


def test_the_logits_tell_sequences_apart(pair: Pair) -> None:
    """Guards the other tests: in a model of uniform attention a wrong mask would not show."""
    ids = tokens(0, 12)
    other = [(ids[0] + 1) % VOCAB, *ids[1:]]
    logits = reference(pair, ids)[0]
    window = pair.manifest.target.window or len(ids)
    row = min(window, len(ids)) - 1
    assert np.abs(logits[row] - reference(pair, other)[0][row]).max() > 1e-3 * np.abs(logits).max()


def test_prefill(pair: Pair) -> None:
    prompt = tokens(1, 23)
    run = Sequences(pair, pair.open_target())
    check(pair, run.run([prompt], [chain(23)]), 0, list(range(23)), [], prompt)


def test_prefill_in_chunks(pair: Pair) -> None:
    prompt = tokens(2, 31)
    run = Sequences(pair, pair.open_target())
    for start, stop in ((0, 9), (9, 10), (10, 26), (26, 31)):
        rows = list(range(stop - start))
        out = run.run([prompt[start:stop]], [chain(len(rows))])
        check(pair, out, 0, rows, prompt[:start], prompt[start:stop])
        run.commit([rows])


def test_every_node_of_a_tree_gets_the_logits_of_its_own_path(pair: Pair) -> None:
    prompt, nodes = tokens(3, 14), tokens(4, len(TREE))
    run = Sequences(pair, pair.open_target())
    run.run([prompt], [chain(14)])
    run.commit([list(range(14))])
    out = run.run([nodes], [TREE])
    for node in range(len(TREE)):
        path = path_to(node, TREE)
        assert len(path) == DEPTHS[node] + 1
        check(pair, out, 0, path, prompt, [nodes[row] for row in path])


def test_rounds_of_tree_pass_and_commit(pair: Pair) -> None:
    """Scattered accepted rows are moved together; the next trees are written over what is left of the last."""
    text = tokens(5, 11)
    run = Sequences(pair, pair.open_target())
    run.run([text], [chain(11)])
    run.commit([list(range(11))])
    for round_, last in enumerate((11, 8, 0, 4)):
        nodes = tokens(10 + round_, len(TREE))
        out = run.run([nodes], [TREE])
        path = path_to(last, TREE)
        check(pair, out, 0, path, text, [nodes[row] for row in path])
        run.commit([path])
        text = text + [nodes[row] for row in path]


def test_sequences_of_different_lengths_in_one_batch(pair: Pair) -> None:
    """Each gets what it gets alone: padding rows, other sequences and stale cache rows leave no trace."""
    texts = [tokens(20 + b, length) for b, length in enumerate((3, 17, 9))]
    run = Sequences(pair, pair.open_target(batch=3), batch=3)
    out = run.run(texts, [chain(len(text)) for text in texts])
    for b, text in enumerate(texts):
        check(pair, out, b, list(range(len(text))), [], text)
    run.commit([list(range(len(text))) for text in texts])
    sizes, accepted = (12, 5, 1), (11, 4, 0)
    nodes = [tokens(30 + b, size) for b, size in enumerate(sizes)]
    out = run.run(nodes, [TREE[:size] for size in sizes])
    paths = [path_to(last, TREE) for last in accepted]
    for b, path in enumerate(paths):
        check(pair, out, b, path, texts[b], [nodes[b][row] for row in path])
    run.commit(paths)
    texts = [text + [ids[row] for row in path] for text, ids, path in zip(texts, nodes, paths, strict=True)]
    out = run.run([[5], [6], [7]], [[-1]] * 3)
    for b, text in enumerate(texts):
        check(pair, out, b, [0], text, [5 + b])


def test_logit_rows_choose_the_rows(pair: Pair) -> None:
    session = pair.open_target(batch=2)
    mask = np.where(np.tri(6, session.cache, dtype=bool), np.float32(0), LOWEST)[None, None].repeat(2, 0)
    inputs = {
        "input_ids": np.array([tokens(40, 6), tokens(41, 6)]),
        "position_ids": np.tile(np.arange(6), (2, 1)),
        "attention_mask": mask,
        "write_index": np.zeros(2, np.int64),
    } | ({"sliding_attention_mask": mask} if pair.manifest.target.sliding_mask else {})
    every = session.run(**inputs, logit_rows=np.tile(np.arange(6), (2, 1)))[0]
    some = session.run(**inputs, logit_rows=np.array([[5, 0], [2, 2]]))[0]
    np.testing.assert_array_equal(some, np.stack([every[0, [5, 0]], every[1, [2, 2]]]))
    none = session.run(**inputs, logit_rows=np.zeros((2, 0), np.int64))[0]
    assert none.shape == (2, 0, VOCAB)


def test_a_token_gets_the_same_bits_alone_and_among_others(pair: Pair) -> None:
    """Lossless decoding compares single-row passes with tree passes; see Decoder._attention_rows."""
    prompt, nodes = tokens(50, 20), tokens(51, 40)
    together = Sequences(pair, pair.open_target(cache=64))
    together.run([prompt], [chain(20)])
    together.commit([list(range(20))])
    expected = together.run([nodes], [chain(40)])[0][0]
    alone = Sequences(pair, pair.open_target(cache=128))
    for i, token in enumerate(prompt + nodes):
        logits = alone.run([[token]], [[-1]])[0][0]
        alone.commit([[0]])
        if i >= 20:
            np.testing.assert_array_equal(logits[0], expected[i - 20])
    batched = Sequences(pair, pair.open_target(batch=4, cache=64), batch=4)
    batched.run([prompt, prompt[:7], prompt[3:], prompt], [chain(20), chain(7), chain(17), chain(20)])
    batched.commit([list(range(20)), list(range(7)), list(range(17)), list(range(20))])
    logits = batched.run([nodes, nodes[:3], nodes[:1], nodes[:8]], [chain(40), chain(3), chain(1), chain(8)])[0]
    np.testing.assert_array_equal(logits[0], expected)
    np.testing.assert_array_equal(logits[3, :8], expected[:8])


def test_the_last_layers_feature_is_taken_before_the_final_norm(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, CASES[0], target_layer_ids=[1, LAYERS - 1])
    outputs = []
    layer = pair.target.model.layers[LAYERS - 1]
    with layer.register_forward_hook(lambda *call: outputs.append(call[-1])), torch.no_grad():
        ids = tokens(60, 9)
        pair.target(torch.tensor([ids]))
    features = Sequences(pair, pair.open_target()).run([ids], [chain(9)])[1]
    last = outputs[0] if isinstance(outputs[0], torch.Tensor) else outputs[0][0]  # transformers 4 returns a tuple
    assert_close(features[0][:, pair.target.config.hidden_size :], last[0].numpy())
