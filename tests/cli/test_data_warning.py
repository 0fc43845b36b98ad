"""Tests of warnings about data: a class of its own, printed by commands, even by quiet ones."""

import warnings

import pytest

from oocgemm import DataWarning
from oocgemm.cli.process import silence_warnings, warnings_as_notes


@pytest.mark.parametrize("quiet", [False, True])
def test_a_command_prints_a_warning_about_data_on_one_line(
    capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    with warnings_as_notes():
        warnings.simplefilter("default")
        if quiet:
            silence_warnings()
        warnings.warn("3 rows of A\nare constant", DataWarning, stacklevel=1)
        warnings.warn("a note", stacklevel=1)
    expected = "Warning: 3 rows of A are constant\n" + ("" if quiet else "Note: a note\n")
    assert capsys.readouterr().err == expected
