"""Every method of a seam documents its arguments."""

import inspect
import re

import pytest

from fumehood import interfaces

EXPORTS: list[type] = [getattr(interfaces, name) for name in interfaces.__all__]
SEAMS = [export for export in EXPORTS if getattr(export, "_is_protocol", False)]


@pytest.mark.parametrize("seam", SEAMS)
def test_arguments_are_documented(seam: type) -> None:
    methods = [method for name, method in vars(seam).items() if inspect.isfunction(method) and name[0] != "_"]
    assert methods
    for method in methods:
        documented = re.findall(r"^ *([a-z_, ]+): ", inspect.getdoc(method) or "", re.MULTILINE)
        expected = set(inspect.signature(method).parameters) - {"self"}
        assert method.__doc__, method
        assert expected <= {name for names in documented for name in names.split(", ")}, method
