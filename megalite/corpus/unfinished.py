"""`PREFIX.unfinished/`: the chunks that an unfinished `prepare` has done, for the next one.

Ids and lengths are appended in order as chunks are done, with one line per chunk in a record: the
chunk's digest, the counts, a checksum. A later run with the same tokenizer and options reads the
source again and takes over chunks as long as digests and checksums agree; from the first that
differs it encodes. So the result is that of one run without a break, however the source has changed
meanwhile, and neither SIGKILL nor a power cut can damage it. Nothing here opens as a dataset.

The work of an earlier run with other options stays until the first chunk of this one is done, so a
mistaken command costs nothing. A folder that no later run can use is removed at the end.

The calls come in this order, which is asserted:

    with Unfinished(prefix) as unfinished:
        unfinished.forget()              # only to start over; later it drops this run's work
        unfinished.begin(options)
        for entry in unfinished.kept():  # while they are those of the source's chunks
            unfinished.accept()
        unfinished.append(encoded)       # for each of the other chunks
        unfinished.seal()
        unfinished.remove()              # when the dataset is published

`path`, `read_json` and `write_json` may be called at any time.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

from megalite.corpus.encoding import Encoded, Entry, checksum
from megalite.corpus.publish import check_prefix, sync, write_synced
from megalite.data.indexed import file_of
from megalite.errors import DataError


class Unfinished:
    """Context manager: the folder of one run, locked against a second run.

    Raises DataError if it cannot be written or another run has locked it.
    """

    def __init__(self, prefix: str | Path) -> None:
        check_prefix(prefix)
        self.prefix = Path(prefix)
        self.folder = file_of(prefix, ".unfinished")
        self.num_chunks = 0  # accepted and appended
        self.is_useful = False  # the same command, given again, can continue from the folder
        self._stage: Literal["opened", "begun", "appending", "sealed"] = "opened"
        self._new_options: dict[str, Any] | None = None  # to write, if the folder has others
        self._forgotten = False
        self._sizes = {"ids": 0, "lengths": 0, "record": 0}  # bytes of accepted chunks, by file
        self._offered: dict[str, int] = {}  # the same of the entry that `kept` gave last
        self._streams: dict[str, IO[bytes]] = {}
        self._lock = self._open_lock()

        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise DataError(
                f"{self.folder}: another run is making this dataset; wait for it, or give "
                "another --out"
            ) from error

    def _open_lock(self) -> IO[bytes]:
        """Make the folder if there is none, check that it can be written, open its lock file."""
        existed = self.folder.is_dir()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = self.path("lock").open("wb")
            # On a full disk a file can still be created, but not written.
            write_synced(self.path("probe"), b"x")
            self.path("probe").unlink()
        except OSError as error:
            if not existed:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise DataError(
                f"{error.filename or self.folder}: cannot be written: {error.strerror}; "
                "give another --out, or the right to write there"
            ) from error
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

    def begin(self, options: dict[str, Any]) -> bool:
        """Keep the chunks in the folder if they were done with the same options.

        Returns True if there are chunks done with others, which the first `append` will replace.
        """
        assert self._stage == "opened", self._stage
        self._stage = "begun"
        record = self.path("record")
        if self.read_json("options.json") != options:
            self._new_options = options
            return record.exists() and record.stat().st_size > 0

        # A run that stopped between two renames of publishing: its ids are the .bin already.
        published = file_of(self.prefix, ".bin")
        interrupted = published.exists() and not file_of(self.prefix, ".idx").exists()
        if interrupted and record.exists() and not self.path("ids").exists():
            os.replace(published, self.path("ids"))
        for name in self._sizes:
            self.path(name).touch()
        return False

    def kept(self) -> Iterator[Entry]:
        """Entries of chunks done before, verified by their checksums; ends at the first bad one.

        Call `accept` for an entry before asking for the next.
        """
        assert self._stage == "begun", self._stage
        if self._new_options is not None:
            return
        with (
            self.path("record").open("rb") as record,
            self.path("ids").open("rb") as ids,
            self.path("lengths").open("rb") as lengths,
        ):
            for line in record:
                try:
                    values = json.loads(line)
                    entry = Entry.from_json(values["entry"])
                    id_bytes, length_bytes = values["id_bytes"], values["length_bytes"]
                except (ValueError, KeyError, TypeError):
                    return
                if checksum(lengths.read(length_bytes), ids.read(id_bytes)) != entry.checksum:
                    return
                self._offered = {"ids": id_bytes, "lengths": length_bytes, "record": len(line)}
                yield entry

    def accept(self) -> None:
        """Take over the entry that `kept` gave last."""
        assert self._stage == "begun", self._stage
        assert self._offered, "no entry to accept"
        self.num_chunks += 1
        self.is_useful = True
        for name, size in self._offered.items():
            self._sizes[name] += size
        self._offered = {}

    def append(self, encoded: Encoded) -> None:
        """Add a chunk after the accepted ones; kept chunks that were not accepted are dropped."""
        if self._stage == "begun":
            self._open_streams()
        assert self._stage == "appending", self._stage
        line = {
            "entry": encoded.entry.to_json(),
            "id_bytes": len(encoded.ids),
            "length_bytes": len(encoded.lengths),
        }
        # The record comes last: a line in it claims that the ids and lengths are there.
        content = {
            "ids": encoded.ids,
            "lengths": encoded.lengths,
            "record": json.dumps(line).encode() + b"\n",
        }
        for name, part in content.items():
            self._streams[name].write(part)
            self._streams[name].flush()
        self.num_chunks += 1
        self.is_useful = True

    def seal(self) -> None:
        """End the files after the last chunk, and wait until they are on disk."""
        if self._stage == "begun":  # no chunk was appended
            self._open_streams()
        assert self._stage == "appending", self._stage
        for stream in self._streams.values():
            sync(stream)
            stream.close()
        self._streams = {}
        self._stage = "sealed"

    def forget(self) -> None:
        """Drop the work in the folder: the next run starts over."""
        for name in ("tokenizer.json", "record"):
            self.path(name).unlink(missing_ok=True)
        self._forgotten = True

    def remove(self) -> None:
        """Delete the folder."""
        assert self._stage == "sealed", self._stage
        shutil.rmtree(self.folder)

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Unlock the folder. Remove it if it holds no work; else an error gets a note about it."""
        for stream in self._streams.values():
            try:
                stream.close()
            except OSError:  # a full disk: the checksum will not match
                continue
        if not self._holds_work():
            shutil.rmtree(self.folder, ignore_errors=True)
        elif error is not None:
            error.add_note(self._note(isinstance(error, Exception)))
        self._lock.close()

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
        record = self.path("record")
        done = record.exists() and record.stat().st_size > 0
        return done or self.path("tokenizer.json").exists()

    def _open_streams(self) -> None:
        """Open the files for appending after the accepted chunks; drop all that follows those."""
        if self._new_options is not None:
            for name in ("record", "ids", "lengths"):  # the record, which claims the rest, first
                self.path(name).unlink(missing_ok=True)
            self.write_json("options.json", self._new_options)
            for name in self._sizes:
                self.path(name).touch()

        for name, size in self._sizes.items():
            stream = self.path(name).open("r+b")
            stream.truncate(size)
            stream.seek(size)
            self._streams[name] = stream
        self._stage = "appending"
