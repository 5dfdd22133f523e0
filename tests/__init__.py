"""The test-suite; `ROOT` is the checkout that it tests."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
