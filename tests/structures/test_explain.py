"""The table of a plan: text, data and HTML."""

from __future__ import annotations

from html.parser import HTMLParser

import torch
import zoo
from test_attach import model

from flash_rt import structures
from flash_rt.structures.explain import COLUMNS


def test_rows_are_data() -> None:
    table = structures.explain(structures.plan(model()))
    assert len(table) == len(table.rows) == len(table.cells()) == 4
    paths = {row.path: row for row in table}
    assert list(paths) == ["norm", "first", "second", "last"]
    first = paths["first"]
    assert first.structure == "gated_mlp"
    assert first.covers == ("first.a", "first.b", "first.c")
    assert first.precision == "fp32"
    assert first.kernels == ("activation v1", "linear v1")
    assert first.kind == "Mlp"
    assert 0 < first.error.bound < 1e-5
    # gate, up, silu, product, down; then gate with up, and down
    assert (first.host_cost.launches, first.cost.launches) == (5, 2)
    assert first.host_cost.written_bytes - first.cost.written_bytes == 5 * 3 * 48 * 4


def test_text_has_one_line_for_each_row_and_aligned_columns() -> None:
    table = structures.explain(structures.plan(model()))
    lines = str(table).splitlines()
    assert len(lines) == 5
    for column in COLUMNS:
        assert column in lines[0]
    start = lines[0].index("decision")
    assert all(line[start:].startswith("Bound") for line in lines[1:])


def test_html_is_escaped_and_complete() -> None:
    class Cells(HTMLParser):
        found = 0

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.found += tag == "td"

    plan = structures.plan(model())
    table = structures.explain(plan)
    parser = Cells()
    parser.feed(table._repr_html_())
    assert parser.found == len(table) * len(COLUMNS)
    assert "-&gt;" in table._repr_html_()


def test_notes_count_replays_and_fallbacks() -> None:
    host = model()
    plan = structures.attach(host)
    x = torch.randn(1, 2, 32)
    with torch.no_grad():
        for _ in range(3):
            host(x)
    text = str(structures.explain(plan))
    plan.detach()
    assert "1 recorded, 2 replays" in text
    assert "carry no grad" in text
    assert "recorded" not in str(structures.explain(plan))


def test_a_plan_is_short_in_a_notebook() -> None:
    plan = structures.plan(zoo.shared("llama"))
    assert repr(plan).startswith("Plan(not attached: ")
    assert len(repr(plan)) < 80
