"""A process that encodes chunks: messages in on stdin, messages out on stdout, until stdin ends.

So a worker never outlives the run that started it, however that ended. See encode_pool.py.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import IO

from megalite.corpus.documents import Chunk
from megalite.corpus.encoding import EncodeOptions, Encoder, read_message, write_message
from megalite.data.tokenizer import Tokenizer


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """First message: the tokenizer and options; then one answer to each chunk."""
    first = read_message(requests)
    if first is None:
        return
    header, model = first
    tokenizer = Tokenizer.from_bytes(model, header["tokenizer"])
    encoder = Encoder(tokenizer, EncodeOptions(header["key"], header["policy"]))
    while request := read_message(requests):
        header, payload = request
        encoded = encoder.encode(Chunk.from_header(header["chunk"], payload), header["check"])
        answer = {
            "entry": encoded.entry.to_json(),
            "failure": encoded.failure,
            "ids_bytes": len(encoded.ids),
        }
        write_message(answers, answer, encoded.ids + encoded.lengths)


def main() -> None:
    """Entry point of the process; Ctrl-C is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    try:
        serve(sys.stdin.buffer, answers)
    except BrokenPipeError:  # the parent is gone
        sys.stderr = None
        raise SystemExit(1) from None
