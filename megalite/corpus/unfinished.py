"""`PREFIX.unfinished/`: the chunks that an unfinished `prepare` has done, for the next one.

Ids, lengths and loss masks are appended in order as chunks are done, with one line per chunk in a
record: the chunk's digest, the counts, and a checksum of line, ids, lengths and mask. A later run
with the same tokenizer and options reads the source again and takes over chunks as long as digests
and checksums agree; from the first that differs it encodes. So the result is that of one run
without a break, however the source has changed meanwhile, and neither SIGKILL nor a power cut can
damage it. Nothing here opens as a dataset.

The work of an earlier run with other options stays until the first chunk of this one is done, so a
mistaken command costs nothing. A folder that no later run can use is removed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TextIO

from megalite.corpus.encoding import Encoded, Entry
from megalite.corpus.publish import check_prefix, publish_files, sync, write_synced
from megalite.data.indexed import file_of
from megalite.data.loss_mask import HEADER, header
from megalite.errors import DataError, cannot_write
from megalite.process.locks import lock_file


class Unfinished:
    """Context manager: the folder of one run, locked against a second run.

    Raises DataError if it cannot be written or another run has locked it.
    """

    def __init__(self, prefix: str | Path) -> None:
        check_prefix(prefix)
        self.prefix = Path(prefix)
        self.folder = file_of(prefix, ".unfinished")
        self.has_tokenizer = False  # one that this run can use
        self._forgotten = False
        self._chunks: Chunks | None = None
        self._lock = self._open_lock()

    def _open_lock(self) -> TextIO:
        """Make the folder if there is none, lock it, check that it can be written."""
        existed = self.folder.is_dir()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = lock_file(self.path("lock"), partial(print, file=sys.stderr))
            # On a full disk a file can still be created, but not written.
            write_synced(self.path("probe"), b"x")
            self.path("probe").unlink()
        except BlockingIOError as error:
            raise DataError(
                f"{self.folder}: another run is making this dataset; wait for it, or give "
                "another --out"
            ) from error
        except OSError as error:
            if not existed:
                shutil.rmtree(self.folder, ignore_errors=True)
            text = cannot_write(error.filename or self.folder, error, "give another --out")
            raise DataError(text) from error
        return lock

    def path(self, name: str) -> Path:
        """The path of a file in the folder."""
        return self.folder / name

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file of the folder; None if it is missing or damaged."""
        try:
            found = json.loads(self.path(name).read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        """Write a JSON file of the folder atomically."""
        write_synced(self.path(name + ".new"), json.dumps(values).encode())
        os.replace(self.path(name + ".new"), self.path(name))

    def chunks(self, options: dict[str, Any]) -> Chunks:
        """The chunks of this run, after those in the folder that were done with these options."""
        is_same = self.read_json("options.json") == options

        # A run that stopped between two renames of publishing: its ids are the .bin already.
        ids, published = self.path("ids"), file_of(self.prefix, ".bin")
        moved = self.holds_chunks() and not ids.exists()
        if is_same and moved and published.exists() and not file_of(self.prefix, ".idx").exists():
            os.replace(published, ids)
        self._chunks = Chunks(self, None if is_same else options)
        return self._chunks

    def forget(self) -> None:
        """Drop the work in the folder: the next run starts over."""
        for name in ("tokenizer.json", "record"):
            self.path(name).unlink(missing_ok=True)
        self._forgotten = True

    def publish(self, made: Mapping[str, Path]) -> None:
        """Rename finished files as `publish_files` does, and delete the folder."""
        publish_files(self.prefix, made)
        shutil.rmtree(self.folder)

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Unlock the folder. Remove it if it holds no work; else an error gets a note about it."""
        if self._chunks is not None:
            self._chunks.close()
        if not self._holds_work():
            shutil.rmtree(self.folder, ignore_errors=True)
        elif error is not None:
            error.add_note(self._note(isinstance(error, Exception)))
        self._lock.close()

    @property
    def is_useful(self) -> bool:
        """True if the same command, given again, can continue from what is in the folder."""
        return self.has_tokenizer or (self._chunks is not None and self._chunks.num_chunks > 0)

    def _note(self, is_fault: bool) -> str:
        """The note for an error; `is_fault`: not an interruption, so there is a cause to remove."""
        if not self.is_useful:
            return f"{self.folder} still holds what an interrupted run has done"
        command = "the same command without --restart" if self._forgotten else "the same command"
        if not is_fault:
            return f"what was done is kept in {self.folder}; {command} goes on"
        return (
            f"what was done before is kept in {self.folder}; once that is mended, {command} goes on"
        )

    def _holds_work(self) -> bool:
        """True if a run can continue from the folder: with chunks or a tokenizer, of any run."""
        return self.holds_chunks() or self.path("tokenizer.json").exists()

    def holds_chunks(self) -> bool:
        """True if the folder has chunks that are done, of any run."""
        record = self.path("record")
        return record.exists() and record.stat().st_size > 0


class Chunks:
    """The chunks of one run: first `take` those done before, then `append` others, then `seal`.

    From the first chunk that differs on nothing is taken any more. With `new_options` nothing is,
    as the folder has chunks done with others, which stay until the first `append`.
    """

    def __init__(self, folder: Unfinished, new_options: dict[str, Any] | None) -> None:
        self.num_chunks = 0  # taken and appended
        self.replaces_others = new_options is not None and folder.holds_chunks()
        self._folder = folder
        self._new_options = new_options
        self._sizes = {
            "ids": 0,
            "lengths": 0,
            "mask": HEADER.size,
            "record": 0,
        }  # bytes of these chunks, by file
        self._appends = False
        self._streams = {} if new_options is not None else self._open()
        self._takes = new_options is None

    def take(self, digest: str, with_skipped: bool) -> Entry | None:
        """Take over the next chunk in the folder; None if it is another or damaged.

        Without `with_skipped`, None also if documents of it were left out.
        """
        found = self._read_next() if self._takes else None
        if (
            found is None
            or found.digest != digest
            or (found.counts.corpus.skipped and not with_skipped)
        ):
            self._takes = False
            return None
        self.num_chunks += 1
        self._sizes = {name: stream.tell() for name, stream in self._streams.items()}
        return found

    def _read_next(self) -> Entry | None:
        """The entry of the next chunk, None if there is none or its checksum differs."""
        stated, _, line = self._streams["record"].readline().partition(b" ")
        try:
            values = json.loads(line)
            entry = Entry.from_json(values["entry"])
            ids = self._streams["ids"].read(values["id_bytes"])
            lengths = self._streams["lengths"].read(values["length_bytes"])
            mask = self._streams["mask"].read(values["mask_bytes"])
        except (ValueError, KeyError, TypeError):
            return None
        return entry if stated == _checksum(line, ids, lengths, mask) else None

    def append(self, encoded: Encoded) -> None:
        """Add a chunk after those so far; chunks in the folder that were not taken are dropped."""
        self._begin_appending()
        line = {
            "entry": encoded.entry.to_json(),
            "id_bytes": len(encoded.ids),
            "length_bytes": len(encoded.lengths),
            "mask_bytes": len(encoded.mask),
        }
        # The record comes last: a line in it claims that the ids and lengths are there.
        record = json.dumps(line).encode() + b"\n"
        stated = _checksum(record, encoded.ids, encoded.lengths, encoded.mask)
        content = {
            "ids": encoded.ids,
            "lengths": encoded.lengths,
            "mask": encoded.mask,
            "record": stated + b" " + record,
        }
        for name, part in content.items():
            self._streams[name].write(part)
            self._streams[name].flush()
        self.num_chunks += 1

    def seal(self, num_tokens: int) -> tuple[Path, Path, Path]:
        """End the files after the last chunk, on disk; returns those of ids, lengths and mask."""
        self._begin_appending()
        self._streams["mask"].seek(0)
        self._streams["mask"].write(header(num_tokens))
        for stream in self._streams.values():
            sync(stream)
        self.close()
        ids, lengths, mask = (self._folder.path(name) for name in ("ids", "lengths", "mask"))
        return ids, lengths, mask

    def close(self) -> None:
        """Close the files."""
        for stream in self._streams.values():
            with suppress(OSError):  # a full disk: the checksum will not match
                stream.close()

    def _begin_appending(self) -> None:
        """Once: drop all that follows the chunks taken, so that others can be written there."""
        if self._appends:
            return
        if self._new_options is not None:
            for name in (
                "record",
                "ids",
                "lengths",
                "mask",
            ):  # the record, which claims the rest, first
                self._folder.path(name).unlink(missing_ok=True)
            self._folder.write_json("options.json", self._new_options)
            self._streams = self._open()
        for name, stream in self._streams.items():
            stream.truncate(self._sizes[name])
            stream.seek(self._sizes[name])
        self._appends, self._takes = True, False

    def _open(self) -> dict[str, IO[bytes]]:
        for name in self._sizes:
            self._folder.path(name).touch()
        streams: dict[str, IO[bytes]] = {
            name: self._folder.path(name).open("r+b") for name in self._sizes
        }
        streams["mask"].seek(HEADER.size)  # which `seal` writes, as it states the number of tokens
        return streams


def _checksum(*parts: bytes) -> bytes:
    """CRC-32 of parts, one after the other, in hex."""
    found = 0
    for part in parts:
        found = zlib.crc32(part, found)
    return b"%08x" % found
