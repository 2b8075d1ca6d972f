"""The prompt pass before the first round."""

from dataclasses import dataclass

import torch

from ddtree.plugins import ops
from ddtree.plugins.tree import Verified
from ddtree.runtime.batch import sampling_tensors
from ddtree.runtime.engine import Engine
from ddtree.runtime.passes import feed_drafter, prompt_pass
from ddtree.runtime.request import Request
from ddtree.runtime.round import Method

PREFILL_CHUNK = 256  # prompt rows of one pass, where the engine was not compiled for a number


@dataclass(frozen=True)
class Prefilled:
    """What a prompt has given: ``verified`` holds the first token, and ``features`` [count, layers*hidden] the context
    features of the prompt's last tokens, which wait for the drafter's next pass. Valid until the engine's next pass."""

    verified: Verified
    features: torch.Tensor


class Prefill:
    """A prompt on its way through both models, chunk by chunk, so that rounds of others can run in between."""

    def __init__(self, engine: Engine, request: Request, method: Method):
        self.request = request
        self._engine, self._method = engine, method
        compiled, draft = engine.manifest.compiled, engine.manifest.draft
        self._chunk = compiled.prefill_chunk if compiled else PREFILL_CHUNK
        self._waiting_rows = draft.max_depth + 1 if draft else 0
        self._prompt = torch.tensor(request.prompt_token_ids)  # int64 [prompt]
        self._start = 0  # rows that have been run

    def run_chunk(self, slot: int) -> Prefilled | None:
        """Run the next chunk in ``slot``, where the chunks before it are. The last one returns what the prompt gave.

        The prompt's last token is verified as a tree that is a root alone, so the first token is drawn as every other.
        """
        engine, start = self._engine, self._start
        token_ids = self._prompt[None, start : start + self._chunk]  # [1, rows]
        rows = token_ids.shape[1]
        self._start = start + rows
        last = self._start == len(self._prompt)
        logits, features = prompt_pass(engine, slot, token_ids, start)
        waiting = 0
        if self._method != "ar":
            # The last rows of the prompt wait for the first round, which saves the drafter a pass on short prompts.
            waiting = min(rows, self._waiting_rows) if last else 0
            if rows > waiting:
                feed_drafter(engine, slot, features[:, : rows - waiting], start)
        if not last:
            return None
        root = self._prompt[-1:].to(engine.device, torch.int32)
        position = torch.full((1,), len(self._prompt) - 1, device=engine.device)
        sampling, rules = sampling_tensors([self.request], engine.device), [self.request.row_rules]
        verified = engine.fetch(ops.verify_tree(logits, ops.root_tree(root), position, sampling, row_rules=rules))()
        return Prefilled(verified, features[0, rows - waiting :])
