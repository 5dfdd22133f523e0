"""The test-suite; `ROOT` is the checkout that it tests."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def tracked_files() -> list[Path]:
    """The files that git knows or would add; in an unpacked source archive those that it lists."""
    archived = ROOT / "megalite.egg-info" / "SOURCES.txt"
    if not (ROOT / ".git").exists():
        names = archived.read_text(encoding="utf-8").splitlines()
    else:
        command = ["git", "ls-files", "-co", "--exclude-standard"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        names = done.stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]
