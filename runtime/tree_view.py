"""A round's draft tree as text, for `ddtree generate --show-tree`."""

import math

from rich.text import Text
from rich.tree import Tree
from tokenizers import Tokenizer

from ddtree.plugins.tree import DraftTree, Verified


def draw_tree(tree: DraftTree, verified: Verified, tokenizer: Tokenizer, slot: int = 0) -> Tree:
    """The tree of one slot: each node's token and its path's draft probability; the accepted path is green, and the
    bonus token hangs at its end."""
    count = int(tree.node_count[slot])
    tokens, parents = tree.token_ids[slot].tolist(), tree.parents[slot].tolist()
    log_probabilities = tree.node_logws[slot].tolist()
    accepted = verified.accepted_nodes[slot].tolist()[: int(verified.accepted_count[slot]) + 1]

    def label(node: int) -> Text:
        style = "bold green" if node in accepted else "dim"
        probability = f" {math.exp(log_probabilities[node]):.1%}" if node else ""
        return Text.assemble((_show(tokenizer, tokens[node]), style), (probability, "dim"))

    branches = {0: Tree(label(0), guide_style="dim")}
    for node in range(1, count):
        branches[node] = branches[parents[node]].add(label(node))
    if not int(verified.status[slot]):
        bonus = int(verified.output_ids[slot, len(accepted) - 1])
        branches[accepted[-1]].add(Text.assemble((_show(tokenizer, bonus), "bold yellow"), (" bonus", "yellow")))
    return branches[0]


def _show(tokenizer: Tokenizer, token: int) -> str:
    return repr(tokenizer.decode([token], skip_special_tokens=False))[1:-1] or f"<{token}>"
