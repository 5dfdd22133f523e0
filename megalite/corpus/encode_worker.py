"""A process that encodes chunks: it reads requests on stdin and writes answers on stdout.

It ends when stdin does, so it never outlives the run that started it, however that ended. See
encode_pool.py.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import IO

from megalite.corpus.documents import CorpusChunk
from megalite.corpus.encoding import EncodeOptions, Encoder, read_message, write_message
from megalite.data.tokenizer import Tokenizer


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until they end. The first message has the tokenizer and the options.

    Each later one has a chunk; its answer has the fields of `Encoded`.
    """
    first = read_message(requests)
    if first is None:
        return
    header, model = first
    tokenizer = Tokenizer.from_bytes(model, header["tokenizer"])
    encoder = Encoder(tokenizer, EncodeOptions(header["key"], header["policy"]))
    while request := read_message(requests):
        header, payload = request
        encoded = encoder.encode(CorpusChunk.from_header(header["chunk"], payload), header["check"])
        answer = {
            "entry": encoded.entry.to_json(),
            "failure": encoded.failure,
            "ids_bytes": len(encoded.ids),
        }
        write_message(answers, answer, encoded.ids + encoded.lengths)


def main() -> None:
    """Entry point of the process. Ctrl-C reaches it, too, but only the parent handles that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # From here on a print, of a library for example, goes to stderr and not between the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        serve(sys.stdin.buffer, answers)
    except BrokenPipeError:  # the parent is gone
        sys.stderr = None  # no message at exit about answers that could not be flushed
        raise SystemExit(1) from None
