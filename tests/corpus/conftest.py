"""The fixtures of the data tests, which the tests of corpora use too."""

from tests.data.conftest import make as make
