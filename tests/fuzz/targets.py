"""All that is fuzzed, by name."""

from __future__ import annotations

from tests.fuzz.browsers import BROWSERS
from tests.fuzz.files import FILES
from tests.fuzz.strangers import STRANGERS
from tests.fuzz.trusted import TRUSTED

TARGETS = {
    name.replace(" ", "-").lower(): target for name, target in {**STRANGERS, **TRUSTED, **FILES, **BROWSERS}.items()
}
