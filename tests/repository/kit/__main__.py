"""`python -m tests.repository.kit > docs/settings.md`: every setting, from config/schema.py."""

from tests.repository.kit.settings import reference

print(reference(), end="")
