"""The documentation site: `make docs`. Pages stay where the repository has them, so their links hold on both."""

from __future__ import annotations

from datetime import date
from importlib.metadata import version as installed_version
from typing import NoReturn

from docutils.nodes import SkipNode, math, math_block
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

project = "Replayfleet"
author = "The Replayfleet developers"
copyright = f"{date.today().year}, {author}"  # noqa: DTZ011 - Sphinx's name; a year needs no zone
version = release = installed_version("replayfleet")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
# The repository's root is the source folder: README, CONTRIBUTING and the pages of docs/ link to each other as files.
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "benchmarks/README.md", "results/small/*.md"]
exclude_patterns = ["README.md", ".*", "build", "dist", "runs", "tests"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # pages may begin lower, as those that are parts of others do

autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "Replayfleet"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
copybutton_exclude = ".linenos, .gp, .go"


def setup(app: Sphinx) -> None:
    """Write formulas as MathML, which browsers draw themselves: pages need no script from elsewhere."""
    app.add_html_math_renderer("mathml", (_write_formula, None), (_write_formula, None))


def _write_formula(writer: HTML5Translator, node: math | math_block) -> NoReturn:
    display = "block" if isinstance(node, math_block) else "inline"
    writer.body.append(convert(node.astext(), display=display))
    raise SkipNode
