"""Doctests under `Example:` are shown as code; griffe takes them for one under `Examples:` alone."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Renames the section in what griffe has read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Do so for a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
