"""Jobs at the same time."""

from threading import Barrier, get_ident

import pytest

from quire.ops.crew import Crew


def test_all_run_at_the_same_time_and_the_first_here():
    everyone, seen = Barrier(3, timeout=10), {}

    def meet(number: int) -> None:
        everyone.wait()
        seen[number] = get_ident()

    crew = Crew(2)
    for _ in range(3):
        seen.clear()
        crew.run([lambda number=number: meet(number) for number in range(3)])
        assert len(set(seen.values())) == 3
        assert seen[0] == get_ident()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_the_callers_and_nobody_is_left_behind(failing):
    done = []

    def work(number: int) -> None:
        if number == failing:
            raise ValueError("broken")
        done.append(number)

    crew = Crew(2)
    with pytest.raises(ValueError, match="broken"):
        crew.run([lambda number=number: work(number) for number in range(3)])
    assert sorted(done) == [number for number in range(3) if number != failing]
    crew.run([lambda: done.append(7)])
    assert done[-1] == 7
