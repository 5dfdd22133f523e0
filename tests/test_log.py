"""Who says what, and where it is kept."""

from __future__ import annotations

import io

from megalite.log import Log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_info_comes_from_rank_0_only_and_warnings_name_their_rank(tmp_path) -> None:
    path = tmp_path / "run" / "log.txt"
    streams = [(io.StringIO(), io.StringIO()) for _ in range(2)]
    for rank, (out, err) in enumerate(streams):
        with Log(rank, 2, path, out=out, err=err) as log:
            log.info("step 1")
            log.warning("hot")
            log.warning_once("twice")
            log.warning_once("twice")
            log.error("over")
    assert [out.getvalue() for out, _ in streams] == ["step 1\n", ""]
    for rank, (_, err) in enumerate(streams):
        assert err.getvalue().splitlines() == [
            f"[rank {rank}] warning: hot",
            f"[rank {rank}] warning: twice",
            f"[rank {rank}] error: over",
        ]
    kept = [line.split(" ", 2)[2] for line in path.read_text().splitlines()]
    assert kept[:2] == ["[rank 0] step 1", "[rank 0] warning: hot"]
    assert "[rank 1] error: over" in kept
    assert "[rank 1] step 1" not in kept


def test_a_single_process_needs_no_rank() -> None:
    err = io.StringIO()
    Log(err=err).warning("hot")
    assert err.getvalue() == "warning: hot\n"


def test_a_terminal_gets_colour_but_no_markup_and_no_wrapping() -> None:
    out, err = Terminal(), Terminal()
    log = Log(out=out, err=err)
    log.info("[bold]" + "x" * 300)
    log.error("over")
    assert out.getvalue() == "[bold]" + "x" * 300 + "\n"
    assert "\x1b[" in err.getvalue()
    assert "over" in err.getvalue()
