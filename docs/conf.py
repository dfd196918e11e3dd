"""Configures Sphinx, which builds the site: ``make docs``."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

project = "fastattn"
release = importlib.metadata.version("fastattn")
html_title = f"fastattn {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_show_copyright = False
html_copy_source = False

myst_heading_anchors = 3  # pages link to each other's headings

# In docstrings a name between single backticks is code.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False


def setup(app: Sphinx) -> None:
    """Leaves out overloads, one for each result, and ``**unknown``. A function's own signature is enough."""
    analyze = ModuleAnalyzer.analyze

    def without_overloads(self: ModuleAnalyzer) -> None:
        analyze(self)
        self.overloads = {}

    ModuleAnalyzer.analyze = without_overloads
    app.connect("autodoc-process-signature", _without_unknown)


def _without_unknown(
    app: Sphinx, what: str, name: str, documented: object, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Leaves out ``**unknown``, which collects misspelt keywords for an error message."""
    return None if signature is None else re.sub(r", \*\*unknown: \w+", "", signature), returns
