"""The reference vectors, computed in float64 by an independent program."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ddtree.plugins import ops, philox
from ddtree.plugins.sampling import filtered_weights

from .oracles import assert_tree_of_vector, sampling, tree_of, vector_logits

VECTORS = Path(__file__).parents[1] / "vectors"


def entries(name: str) -> list:
    return [pytest.param(entry, id=str(at)) for at, entry in enumerate(json.loads((VECTORS / name).read_text()))]


@pytest.mark.parametrize("entry", entries("philox4x32_10.json"))
def test_philox_known_answers(entry):
    counter, key = (np.array(entry[name], np.uint64)[:, None] for name in ("counter", "key"))
    assert philox.philox4x32_10(counter, key)[:, 0].tolist() == entry["words"]


@pytest.mark.parametrize("entry", entries("gumbel.json"))
def test_gumbel_noise(entry):
    groups = np.arange(-(-entry["vocab"] // 4))
    uniforms = philox.token_uniforms(entry["seed"], np.array([entry["position"]]), groups)
    noise = philox.gumbel(uniforms).ravel()[: entry["vocab"]]
    np.testing.assert_allclose(noise, entry["values"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("entry", entries("filters.json"))
def test_filters_keep_exactly(entry):
    logits = np.array(entry["logits"], np.float32)
    settings = (entry["temperature"], entry.get("top_k", 0), entry.get("top_p", 1.0), entry.get("min_p", 0.0))
    _, weights = filtered_weights(logits, *settings)
    assert weights.nonzero()[0].tolist() == entry["kept"]


@pytest.mark.parametrize("entry", entries("draw.json"))
def test_coupled_draw(entry):
    settings = {"temperature": entry["temperature"], "seed": entry["seed"], **entry["filters"]}
    verified = ops.verify_tree(
        torch.tensor([[entry["logits"]]]),
        ops.root_tree(torch.tensor([0])),
        torch.tensor([entry["position"] - 1]),
        sampling([settings]),
    )
    assert verified.output_ids.tolist() == [[entry["token"]]]


@pytest.mark.parametrize("entry", entries("build_tree.json"))
def test_build_tree(entry):
    tree = ops.build_tree(vector_logits(entry), torch.tensor([3]), budget=entry["budget"])
    assert_tree_of_vector(tree, entry)


@pytest.mark.parametrize("entry", entries("verify_tree.json"))
def test_verify_tree(entry):
    tree = tree_of(entry["token_ids"], entry["parents"], max_depth=8)
    assert tree.next_token[0].tolist() == entry["next_token"]
    assert tree.next_sibling[0].tolist() == entry["next_sibling"]
    verified = ops.verify_tree(
        torch.tensor([entry["logits"]]),
        tree,
        torch.tensor([entry["root_position"]]),
        sampling([{"temperature": entry["temperature"], "seed": entry["seed"], **entry["filters"]}]),
    )
    accepted = len(entry["accepted_nodes"])
    assert verified.accepted_count.tolist() == [accepted - 1]
    assert verified.accepted_nodes[0].tolist() == entry["accepted_nodes"] + [-1] * (9 - accepted)
    assert verified.output_ids[0].tolist() == entry["output_ids"] + [-1] * (9 - accepted)
    assert verified.status.tolist() == [0]
