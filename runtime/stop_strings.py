"""Where a text ends because it holds one of some strings."""

from collections.abc import Iterator, Sequence


class StopStrings:
    """Finds the stop strings of one sequence in its text while it grows."""

    def __init__(self, strings: Sequence[str]):
        self._strings = tuple(dict.fromkeys(strings))

    def found(self, text: str, searched: int) -> Iterator[tuple[int, int]]:
        """Every place (start, end) of a stop string that ends beyond ``searched`` characters, in order of the ends.

        Of places with one end the longest string's comes first, so the order does not depend on how the text arrived.
        """
        places = set()
        for string in self._strings:
            start = text.find(string, max(0, searched - len(string) + 1))
            while start >= 0:
                places.add((start + len(string), start))
                start = text.find(string, start + 1)
        for end, start in sorted(places):
            yield start, end

    def undecided(self, text: str) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return max(self._overlap(text, string) for string in self._strings)

    @staticmethod
    def _overlap(text: str, string: str) -> int:
        """The length of the longest end of ``text`` that ``string``, longer than it, starts with."""
        tail = text[max(0, len(text) - len(string) + 1) :]
        return next((len(tail) - at for at in range(len(tail)) if string.startswith(tail[at:])), 0)
