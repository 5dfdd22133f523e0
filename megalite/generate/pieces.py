"""The text of tokens as it is made, in pieces that no later token can change."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.data.tokenizer import Tokenizer


class Pieces:
    """The text of a prompt and of the tokens that follow, up to the first of `stops` after it.

    Joined, the pieces of `add` and `rest` are the text of all tokens decoded together: a character
    may consist of tokens of both parts, and the space that begins a text is left out. `start` is
    the prompt's text alone. `stopped` is True once a stop has come, which is left out.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self._tokenizer, self._tokens, self._stops = tokenizer, list(prompt), stops
        self._text = self.start = tokenizer.decode(self._tokens)
        self._num_given = 0
        self.stopped = False

    def add(self, *tokens: int) -> str:
        """Take further tokens; the text that they settle. Without any, that of the prompt."""
        self._tokens += tokens
        self._text = self._tokenizer.decode(self._tokens)
        first = len(self.start)
        found = [at for stop in self._stops if (at := self._text.find(stop, first)) >= 0]
        if found:
            self.stopped = True
            self._text = self._text[: min(found)]
            return self.rest()

        # The bytes of an unfinished character are decoded as U+FFFD until the others are there, and
        # the end of the text may be the beginning of a stop.
        settled = self._text.rstrip("\ufffd")
        held = max((_common(settled[first:], stop) for stop in self._stops), default=0)
        return self._give(settled[: len(settled) - held])

    def rest(self) -> str:
        """The text that was held back, when no more tokens come."""
        return self._give(self._text)

    def _give(self, text: str) -> str:
        new = text[self._num_given :]
        self._num_given = max(self._num_given, len(text))
        return new


def _common(text: str, stop: str) -> int:
    """The number of characters at the end of a text that are the beginning of a stop."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
