"""What the page on streams says of data sets."""

from __future__ import annotations

import re
from pathlib import Path

from replayfleet.federation.simulator.tables.paper import paper_tables

PAGE = Path(__file__).parents[2] / "docs/streams.md"


def test_a_data_set_of_the_papers_tables_is_not_said_to_be_in_no_paper() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    strange = {name for name, sizes in rows if sizes == "not in the paper"}
    in_tables = {column.dataset for table in paper_tables().values() if table.paper for column in table.columns}
    assert in_tables <= {name for name, _ in rows}
    assert not strange & in_tables
