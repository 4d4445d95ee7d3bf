"""Record which slices of an epoch are done, in about a kilobyte.

An epoch has up to a million slices, each of which one node trains on once. They are grouped into at most
`MAX_SECTIONS` *sections* of consecutive slices. Leases begin where a section's undone rest begins, and are worked off
from the front, so the done slices of a section are a front part of it. This needs a number for each of the few sections
that are begun, and a bit for each section that is whole. A run with fewer slices has sections of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# Capacity of one author's entries: seven of 192 bytes (`farandole.protocol.state.entries`, LEASE except slot 0).
PART_BYTES = 192
NUM_PARTS = 7
SECTIONS_OF_PART = 8 * PART_BYTES
MAX_SECTIONS = NUM_PARTS * SECTIONS_OF_PART


class Sections:
    """The grouping of slices, which is the same for all nodes that have the same text."""

    def __init__(self, num_slices: int) -> None:
        self.num_slices = num_slices
        self.size = -(-num_slices // MAX_SECTIONS)
        self.count = -(-num_slices // self.size)
        self.all = (1 << self.count) - 1
        """A bit for each, as in all masks here."""

    def of(self, index: int) -> int:
        """Return the section of a slice."""
        return index // self.size

    def begin(self, section: int) -> int:
        """Return the first slice of a section."""
        return section * self.size

    def end(self, section: int) -> int:
        """Return the slice after a section's last one."""
        return min((section + 1) * self.size, self.num_slices)

    def mask(self, first: int, end: int) -> int:
        """Return the mask of the sections that hold slices from ``first`` up to ``end``."""
        return _ones(self.of(first), self.of(end - 1) + 1) if first < end else 0


class DoneSlices:
    """A set of slices that only grows."""

    def __init__(self, sections: Sections) -> None:
        self.sections = sections
        self.whole = 0
        """The sections that are done."""
        self.fronts: dict[int, int] = {}
        """Section -> number of its slices that are done, for sections that are begun and not whole."""
        self._ahead: set[int] = set()  # done, but some before them in their section are not

    @property
    def count(self) -> int:
        """Return the number of slices that are done."""
        sections, last = self.sections, self.sections.count - 1
        whole = self.whole.bit_count() * sections.size
        if self.whole >> last & 1:
            whole -= sections.begin(last) + sections.size - sections.num_slices
        return whole + sum(self.fronts.values())

    def next(self, index: int) -> int:
        """Return the first slice from ``index`` on that is not done; the number of slices if there is none."""
        sections = self.sections
        if index >= sections.num_slices:
            return sections.num_slices
        section = sections.of(index)
        if not self.whole >> section & 1:
            return max(index, sections.begin(section) + self.fronts.get(section, 0))
        following = next_bit(~self.whole & sections.all, section)
        if following is None:
            return sections.num_slices
        return sections.begin(following) + self.fronts.get(following, 0)

    def add(self, index: int) -> None:
        """Mark one slice as done."""
        section = self.sections.of(index)
        begin = self.sections.begin(section)
        if self.whole >> section & 1 or index < begin + self.fronts.get(section, 0):
            return
        self._ahead.add(index)
        self._set_front(section, begin)

    def add_lease(self, first: int, end: int) -> None:
        """Mark slices from ``first`` up to ``end`` as done, and the slices before them in their section.

        (A node that leases from the middle of a section on has learnt that the slices before are done.)
        """
        if first >= end:
            return
        sections, last = self.sections, self.sections.of(end - 1)
        self.add_sections(_ones(sections.of(first), last))
        self._set_front(last, end)

    def add_sections(self, mask: int) -> None:
        """Mark the sections in a mask as done."""
        new = mask & self.sections.all & ~self.whole
        if not new:
            return
        self.whole |= new
        if new.bit_count() > 1:
            self.fronts = {section: done for section, done in self.fronts.items() if not new >> section & 1}
        else:  # most calls, in runs that have thousands of fronts
            self.fronts.pop(new.bit_length() - 1, None)
        if self._ahead:
            self._ahead = {index for index in self._ahead if not new >> self.sections.of(index) & 1}

    def _set_front(self, section: int, front: int) -> None:
        """Mark a section's slices before ``front`` as done, and advance over slices that were done ahead."""
        begin, end = self.sections.begin(section), self.sections.end(section)
        front = max(front, begin + self.fronts.get(section, 0))
        while front in self._ahead:
            front += 1
        if front >= end:
            self.add_sections(1 << section)
        elif front > begin and not self.whole >> section & 1:
            self.fronts[section] = front - begin
            if self._ahead:
                self._ahead = {index for index in self._ahead if not begin <= index < front}


def next_bit(mask: int, position: int) -> int | None:
    """Return the position of the first bit set in ``mask`` from ``position`` on; None if there is none."""
    rest = mask >> position
    return position + (rest & -rest).bit_length() - 1 if rest else None


def run_length(mask: int, position: int) -> int:
    """Return the number of consecutive bits set from ``position`` on."""
    rest = ~(mask >> position)
    return (rest & -rest).bit_length() - 1


def said_by(masks: Iterable[int], needed: int) -> int:
    """Return the mask of the sections that are in at least ``needed`` of these masks."""
    digits: list[int] = []  # how many masks have each section: a mask for each binary digit of that
    everything = 0
    for mask in masks:
        everything |= mask
        carry = mask
        for place, digit in enumerate(digits):
            digits[place], carry = digit ^ carry, digit & carry
        if carry:
            digits.append(carry)
    more, equal = 0, everything
    for place in reversed(range(max(len(digits), needed.bit_length()))):
        digit = digits[place] if place < len(digits) else 0
        if needed >> place & 1:
            equal &= digit
        else:
            more |= equal & digit
            equal &= ~digit
    return more | equal


def parts(mask: int) -> Iterator[bytes]:
    """Yield a mask as `NUM_PARTS` parts, one per entry, without trailing zero bytes."""
    for part in range(NUM_PARTS):
        bits = mask >> part * SECTIONS_OF_PART & _ones(0, SECTIONS_OF_PART)
        yield bits.to_bytes(-(-bits.bit_length() // 8), "little")


def part_mask(part: int, raw: bytes) -> int:
    """Return the mask of one of these parts."""
    return int.from_bytes(raw, "little") << part * SECTIONS_OF_PART


def _ones(first: int, end: int) -> int:
    return (1 << end) - (1 << first) if first < end else 0
