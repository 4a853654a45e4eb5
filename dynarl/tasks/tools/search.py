"""The tool `search`: the sentence of a small corpus that a query fits best, by BM25.

Score of document d for a query (Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009,
with the idf that is never negative): the sum over the query's words t, which occur f times in d, of
log(1 + (n - n_t + 0.5) / (n_t + 0.5)) * f / (f + K1 * (1 - B + B * |d| / mean |d|)).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any, Sequence

from dynarl.tasks.tools.base import Tool, ToolError

K1, B = 1.2, 0.75
LONGEST = 200  # characters of a query


class Search(Tool):
    """The best `num_results` sentences, a line each.

    >>> Search(["Mount Vorrin is 4182 metres high.", "Lake Tamdar is 96 metres deep."]).call("how high is Vorrin", {})
    'Mount Vorrin is 4182 metres high.'
    """

    def __init__(self, sentences: Sequence[str], num_results: int = 1):
        self._sentences, self._num_results = list(sentences), num_results
        self._counts = [Counter(_words(sentence)) for sentence in sentences]
        mean = sum(counts.total() for counts in self._counts) / len(self._counts)
        self._damping = [K1 * (1 - B + B * counts.total() / mean) for counts in self._counts]
        with_word = Counter(word for counts in self._counts for word in counts)
        self._idf = {word: math.log(1 + (len(self._counts) - n + 0.5) / (n + 0.5)) for word, n in with_word.items()}

    def call(self, arguments: str, session: dict[str, Any]) -> str:
        words = [word for word in _words(arguments[:LONGEST]) if word in self._idf]
        scores = [sum(self._idf[word] * counts[word] / (counts[word] + damping) for word in words)
                  for counts, damping in zip(self._counts, self._damping)]
        best = sorted((index for index, score in enumerate(scores) if score), key=lambda index: (-scores[index], index))
        if not best:
            raise ToolError("nothing found")
        return "\n".join(self._sentences[index] for index in best[: self._num_results])


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
