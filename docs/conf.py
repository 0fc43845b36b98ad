"""How Sphinx builds these pages: scripts/docs."""

import sys
from pathlib import Path

from oocgemm import __version__

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))  # http_api, verb_pages

project = "oocgemm"
author = "The oocgemm developers"
copyright = author  # noqa: A001  # a name of Sphinx's
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "http_api",
    "verb_pages",
]
exclude_patterns = ["_build"]
root_doc = "index"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # generated sections begin at a level of their own

nitpicky = True
# Types of the standard library, of NumPy and of modules that the API page does not show.
nitpick_ignore_regex = [
    ("py:.*", r"(?!oocgemm\.(gemm|matmul|plan|verify|report|read_log|release|Client|Job)$).*")
]
default_role = "code"  # docstrings write `name` for code
highlight_language = "text"

autodoc_typehints = "none"  # the signatures of the reference stay short; docstrings tell types
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"oocgemm {version}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_copy_source = False
html_show_sourcelink = False
