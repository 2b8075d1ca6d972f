"""A text ends where a search over the whole of it finds a stop string, however its tokens arrive."""

import itertools

from hypothesis import event, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ddtree.runtime.request import Request
from ddtree.runtime.sampling_params import SamplingParams
from ddtree.runtime.vocabulary import Vocabulary

from . import tokenizers_of_bytes

VOCABULARIES = {
    name: Vocabulary(tokenizer, tokenizer.get_vocab_size(), [])
    for name, tokenizer in ((name, make()) for name, make in tokenizers_of_bytes.ALL.items())
}


def request(vocabulary: Vocabulary, **params) -> Request:
    return Request(
        request_id=0,
        index=0,
        prompt=None,
        prompt_token_ids=[0],
        params=SamplingParams(logprobs=1, **params),
        seed=0,
        vocabulary=vocabulary,
    )


def ended(tokenizer: Tokenizer, ids: list[int], params: dict) -> tuple[str, list[int], str, int | str | None]:
    """Text, tokens, finish_reason and stop_reason, from the definition: search the text that there would be without."""
    keep, max_tokens = params["include_stop_str_in_output"], params["max_tokens"]
    ids = ids[:max_tokens]
    stops = [at for at, token in enumerate(ids) if token in params["stop_token_ids"]]
    finish_reason, stop_reason = "length", None
    if stops:
        ids = ids[: stops[0] + 1]
        finish_reason, stop_reason = "stop", ids[-1]

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=params["skip_special_tokens"])

    text = decode(ids[:-1] if finish_reason == "stop" and not keep else ids)
    matches = sorted(
        (start + len(stop), start)
        for stop in params["stop"]
        for start in range(len(text))
        if text[start : start + len(stop)] == stop
    )
    for end, start in matches:
        cut = text[: end if keep else start]
        # Fewer do not spell it, and as many do whatever follows: the first byte of a character is not its text.
        spelled = [decode(ids[:count]).startswith(cut) for count in range(len(ids) + 1)]
        fewest = max((count + 1 for count, is_spelled in enumerate(spelled) if not is_spelled), default=0)
        if fewest >= params["min_tokens"]:
            return cut, ids[:fewest], "stop", text[start:end]
    return text, ids, finish_reason, stop_reason


@st.composite
def cases(draw):
    name = draw(st.sampled_from(sorted(VOCABULARIES)))
    tokenizer = VOCABULARIES[name].tokenizer
    # Few different tokens, so that strings over them come again.
    token = st.integers(0, tokenizer.get_vocab_size() - 1)
    spelled = [token for piece in ("a", "b", "é☃", " a", "w1 w2") for token in tokenizer.encode(piece).ids]
    few = draw(st.lists(token | st.sampled_from(spelled or [0]), min_size=1, max_size=6))
    ids = draw(st.lists(st.sampled_from(few), min_size=1, max_size=30))
    whole = tokenizer.decode(ids, skip_special_tokens=False) or "a"
    piece = st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 9)).map(lambda at: whole[at[0] : sum(at)])
    of_letters = st.text("ab ☃�w1", min_size=1, max_size=4)
    params = draw(
        st.fixed_dictionaries(
            {
                "stop": st.lists(piece, min_size=1, max_size=2) | st.lists(piece | of_letters, min_size=1, max_size=3),
                "include_stop_str_in_output": st.booleans(),
                "skip_special_tokens": st.booleans(),
                "stop_token_ids": st.lists(token | st.sampled_from(few), max_size=1),
                "max_tokens": st.integers(max(1, len(ids) - 3), len(ids)),
            }
        )
    )
    params["min_tokens"] = draw(st.just(0) | st.integers(0, params["max_tokens"]))
    borders = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=10) | st.just(range(1, len(ids)))))
    return name, params, [ids[a:b] for a, b in itertools.pairwise([0, *borders, len(ids)])]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_the_text_is_cut_where_a_search_over_the_whole_text_says(case):
    name, params, rounds = case
    vocabulary, ids = VOCABULARIES[name], [*itertools.chain(*rounds)]
    served, shown, emitted = request(vocabulary, **params), [], 0
    for token_ids in rounds:
        served.extend(token_ids, [float(emitted + at) for at in range(len(token_ids))])
        emitted += len(token_ids)
        shown.append((served.text, served.output_ids, served.logprobs))
        if served.finished:
            break
    text, kept, finish_reason, stop_reason = ended(vocabulary.tokenizer, ids, params)
    event(f"{finish_reason} {type(stop_reason).__name__}")
    assert (served.text, served.output_ids) == (text, kept)
    assert (served.finish_reason, served.stop_reason) == (finish_reason, stop_reason)
    assert served.logprobs == [float(at) for at in range(len(kept))]
    assert served.cumulative_logprob == sum(range(len(kept)))
    if any(len(earlier) == len(text) > 0 for earlier, _, _ in shown[:-1]) and finish_reason == "stop":
        event("the beginning of a stop string was held back")
    for earlier, ids, logprobs in shown:
        assert text.startswith(earlier)
        assert kept[: len(ids)] == ids or (name == "byte fallback" and kept == ids[: len(kept)])
        assert len(logprobs) == len(ids)


def test_what_may_still_be_cut_off_is_not_shown():
    vocabulary = VOCABULARIES["byte level"]
    served, shown = request(vocabulary, max_tokens=20, stop=["bab", "é!"]), []
    for token in vocabulary.tokenizer.encode("aab aéé!").ids:
        served.extend([token], [0.0])
        shown.append((served.text, len(served.output_ids), len(served.logprobs)))
    texts, counts = ["a", "aa", "aa", "aab ", "aab a", "aab a", "aab a", "aab a", "aab aé"], [1, 2, 2, 4, 5, 5, 5, 5, 7]
    assert shown[:9] == [(text, count, count) for text, count in zip(texts, counts, strict=True)]
    assert (served.text, served.stop_reason, len(served.output_ids)) == ("aab aé", "é!", 7)
