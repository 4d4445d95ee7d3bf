from __future__ import annotations

from farandole.protocol.wire.token_bucket import TokenBucket


def test_it_gives_so_many_at_once_and_so_many_a_second() -> None:
    bucket = TokenBucket(capacity=3, rate=0.5, now=100.0)
    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(101.0)
    assert bucket.take(102.0)
    assert bucket.available(1_000.0) == 3


def test_a_clock_that_is_set_back_refills_nothing_and_holds_nothing_up() -> None:
    bucket = TokenBucket(capacity=3, rate=0.5, now=3_700.0)
    assert bucket.take(3_700.0, 3)
    assert bucket.available(100.0) == 0
    assert bucket.take(102.0)
    assert not bucket.take(102.0)
