from __future__ import annotations

from farandole.node.base.system.terminal import without_controls


def test_what_a_terminal_obeys_is_replaced_and_all_else_is_kept() -> None:
    obeyed = [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), "\u202e", "\u2066", "\udc80"]
    assert without_controls("".join(obeyed)) == "".join(letter if letter in "\n\t" else "\ufffd" for letter in obeyed)
    shown = "def f():\n\treturn 'na\u00efve \u20ac \u05d0 \U0001f468\u200d\U0001f469'"
    assert without_controls(shown) == shown
