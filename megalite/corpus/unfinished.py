"""`PREFIX.unfinished/`: what an unfinished `prepare` has done, so that the next one goes on.

Ids and lengths are appended in order as chunks are done, with one line a chunk in a record: the
chunk's digest, the counts, a checksum. A later run with the same tokenizer and options reads the
source again and takes over chunks as long as digests and checksums agree; from the first that does
not, it encodes. So the result is that of one run without a break, whatever became of the source
meanwhile, and neither SIGKILL nor a power cut can spoil it. Nothing here opens as a dataset.

What an earlier run did under other options stays until the first chunk of this one is done, so that
a mistaken command costs nothing. A folder that no later run can use is removed at the end.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from megalite.corpus.encoding import Encoded, Entry, checksum
from megalite.corpus.publish import check_prefix, sync, write_synced
from megalite.data.indexed import file_of
from megalite.errors import DataError

LENGTH_BYTES = 4


class Unfinished:
    """The folder of one run, locked against a second one. A context manager."""

    def __init__(self, prefix: str | Path) -> None:
        check_prefix(prefix)
        self.prefix = Path(prefix)
        self.folder = file_of(prefix, ".unfinished")
        self.num_chunks = 0  # done and taken over
        self.is_useful = False  # the same command, given again, uses what is there
        self._options: dict[str, Any] | None = None  # to write, where what is there has others
        self._forgotten = False
        self._sizes = {"ids": 0, "lengths": 0, "record": 0}
        self._streams: dict[str, IO[bytes]] = {}
        self._next: dict[str, int] = {}  # sizes of the entry that `kept` gave last
        existed = self.folder.is_dir()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = self.path("lock").open("wb")
            write_synced(self.path("probe"), b"x")
            self.path("probe").unlink()
        except OSError as error:
            if not existed:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise DataError(
                f"{error.filename or self.folder}: cannot be written: {error.strerror}; "
                "give another --out, or the right to write there"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise DataError(
                f"{self.folder}: another run is making this dataset; wait for it, or give "
                "another --out"
            ) from error

    def path(self, name: str) -> Path:
        """A file of the folder."""
        return self.folder / name

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A file's object; None if it is missing or not whole."""
        try:
            found = json.loads(self.path(name).read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        """Write a file of the folder, whole or not at all."""
        write_synced(self.path(name + ".new"), json.dumps(values).encode())
        os.replace(self.path(name + ".new"), self.path(name))

    def begin(self, options: dict[str, Any]) -> bool:
        """Keep what was done under the same options; whether anything was under others, which the
        first chunk will replace."""
        record = self.path("record")
        if self.read_json("options.json") != options:
            self._options = options
            return record.exists() and record.stat().st_size > 0
        published = file_of(self.prefix, ".bin")
        interrupted = published.exists() and not file_of(self.prefix, ".idx").exists()
        if interrupted and record.exists() and not self.path("ids").exists():
            os.replace(published, self.path("ids"))  # stopped between two renames of publishing
        for name in self._sizes:
            self.path(name).touch()
        return False

    def kept(self) -> Iterator[Entry]:
        """Chunks done before, each checked against its checksum; ends at the first that is not
        whole. `accept` an entry before asking for the next."""
        if self._options is not None:
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
                self._next = {"ids": id_bytes, "lengths": length_bytes, "record": len(line)}
                yield entry

    def accept(self) -> None:
        """Take over the entry that `kept` gave last."""
        self.num_chunks += 1
        self.is_useful = True
        for name, size in self._next.items():
            self._sizes[name] += size

    def append(self, encoded: Encoded) -> None:
        """Add a chunk after the accepted ones; what followed those goes."""
        if not self._streams:
            self._open()
        line = {
            "entry": encoded.entry.to_json(),
            "id_bytes": len(encoded.ids),
            "length_bytes": len(encoded.lengths),
        }
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
        """Everything is done: cut what follows, and wait until it is on disk."""
        if not self._streams:
            self._open()
        for stream in self._streams.values():
            sync(stream)
            stream.close()
        self._streams = {}

    def forget(self) -> None:
        """Drop what was done; the next run starts over."""
        for name in ("tokenizer.json", "record"):
            self.path(name).unlink(missing_ok=True)
        self._forgotten = True

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder)

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ends the run; an error that leaves work behind gets a note that says so."""
        for stream in self._streams.values():
            try:
                stream.close()
            except OSError:  # a full disk: what is missing is seen by its checksum
                continue
        if not self._holds_work():
            shutil.rmtree(self.folder, ignore_errors=True)
        elif error is not None:
            error.add_note(self._note(isinstance(error, Exception)))
        self._lock.close()

    def _note(self, refused: bool) -> str:
        if not self.is_useful:
            return f"{self.folder} still holds what an interrupted run has done"
        same = "the same command" + (" without --restart" if self._forgotten else "")
        before, once = (" before", "once that is mended, ") if refused else ("", "")
        return f"what was done{before} is kept in {self.folder}; {once}{same} goes on"

    def _holds_work(self) -> bool:
        """Whether there is anything to go on from, of this run or of an earlier one."""
        record = self.path("record")
        done = record.exists() and record.stat().st_size > 0
        return done or self.path("tokenizer.json").exists()

    def _open(self) -> None:
        if self._options is not None:
            for name in ("record", "ids", "lengths"):  # the record, which claims the rest, first
                self.path(name).unlink(missing_ok=True)
            self.write_json("options.json", self._options)
            for name in self._sizes:
                self.path(name).touch()
        for name, size in self._sizes.items():
            stream = self.path(name).open("r+b")
            stream.truncate(size)
            stream.seek(size)
            self._streams[name] = stream
