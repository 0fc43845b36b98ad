"""Remove from texts the control characters that a terminal would obey.

Names, paths, messages and logs come from other users, and from files of others. A terminal takes control
characters in texts as commands: it moves the cursor, changes the lines printed before, or sets its title. So
control characters are removed when a text is shown. Line breaks are removed, too: a user could take a second
line for a line of this program.
"""

import re

# Line breaks and tabs become spaces.
_BREAKS = frozenset("\t\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029")
# The control characters C0, DEL and C1; the surrogates for bytes of C1 that Python could not decode; and
# characters that reverse or hide the text after them.
_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\udc80-\udc9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]"
)


# The control characters that texts of several lines keep.
LINES = "\n\t"


def plain(text: str, keep: str = "") -> str:
    r"""Return a text without control characters, on one line. The characters of `keep` stay.

    >>> plain("A\x1b[2J.zarr\nError: none"), plain("a\x07\n", keep="\n")
    ('A[2J.zarr Error: none', 'a\n')
    """
    return _CONTROLS.sub(lambda found: _shown(found[0], keep), text)


def _shown(character: str, keep: str) -> str:
    return character if character in keep else " " if character in _BREAKS else ""
