"""A run whose steps become slower says so once, with what it knows."""

from __future__ import annotations

from megatron_npu.pretrain.run.pace import STEPS, Load, Pace


def _pace() -> Pace:
    loads = iter(Load(8 + number // 30, 100 * number, 2**30, 1.0) for number in range(1000))
    return Pace(lambda: next(loads))


def _lines(pace: Pace, seconds: float, stretches: int, steps: int = 1) -> list[str]:
    noted = (pace.note(seconds * steps, steps) for _ in range(stretches))
    return [line for line in noted if line]


def test_an_even_pace_is_not_worth_a_word() -> None:
    pace = _pace()
    assert not _lines(pace, 0.5, 100)
    assert not _lines(pace, 0.7, 100)


def test_slower_steps_are_told_once_each_time() -> None:
    pace = _pace()
    _lines(pace, 0.5, 30)
    assert not _lines(pace, 1.0, STEPS - 1)
    (line,) = _lines(pace, 1.0, 50)
    assert "2.0 times as slow: 500 ms -> 1000 ms" in line
    assert "threads 8 -> 9, context switches per step 100 -> 100" in line
    assert not _lines(pace, 0.5, 5)
    assert len(_lines(pace, 1.0, STEPS)) == 1


def test_a_few_slow_steps_are_chance() -> None:
    pace = _pace()
    _lines(pace, 0.5, 30)
    for _ in range(5):
        assert not _lines(pace, 5.0, STEPS // 2)
        _lines(pace, 0.5, 1)


def test_long_stretches_count_with_all_their_steps() -> None:
    pace = _pace()
    _lines(pace, 0.5, 2, steps=10)
    assert len(_lines(pace, 1.0, 2, steps=10)) == 1


def test_the_process_can_be_looked_at() -> None:
    load = Load.now()
    assert load.threads >= 1
    assert load.memory > 2**20
