"""How often a plan is made. Runs without FlashInfer, and without a GPU: what is lent is the plan's own class, and no wrapper is run."""

import torch

from kvdock_flashinfer import one_step
from kvdock_flashinfer.planned import Planned
from kvdock_flashinfer.steps import planned


class Maker:
    """Makes plans, and counts them."""

    def __init__(self) -> None:
        self.made = 0
        self.spare: list[int] = []

    def __call__(self) -> Planned:
        self.made += 1
        return Planned(self.made, 1, None, self.spare)

    def used(self, of: str, *tensors: torch.Tensor | None) -> int:
        """Return the number of the plan that a call gets."""
        with planned(of, tensors, self) as plan:
            assert plan is not None
            number: int = plan.wrapper
            return number


def test_each_call_has_a_plan_of_its_own_that_is_given_back() -> None:
    maker, table = Maker(), torch.zeros(2, 3)
    assert [maker.used("layer", table, None) for _ in range(3)] == [1, 2, 3]
    assert maker.spare == [1, 2, 3]


def test_within_a_step_equal_tensors_share_one() -> None:
    maker, table, lens = Maker(), torch.zeros(4, 3), torch.ones(4)
    with one_step():
        assert [maker.used("layer", table, lens), maker.used("layer", table[:], lens)] == [1, 1]
        assert maker.used("other options", table, lens) == 2
        assert maker.used("layer", table[:2], lens[:2]) == 3
        assert maker.used("layer", table, None) == 4
        assert maker.spare == [], "they are in use until the step ends"
    assert maker.spare == [1, 2, 3, 4]
    with one_step():
        assert maker.used("layer", table, lens) == 5


def test_what_was_written_by_torch_is_planned_anew() -> None:
    maker, lens = Maker(), torch.ones(4)
    with one_step():
        assert maker.used("layer", lens) == 1
        lens[:2].add_(1)
        assert maker.used("layer", lens) == 2


def test_memory_of_a_step_goes_to_no_other_tensor_of_it() -> None:
    maker = Maker()
    with one_step():
        numbers = [maker.used("layer", torch.full((4,), value)) for value in range(8)]
    assert numbers == list(range(1, 9)), "each was freed by its maker before the next was made"


def test_a_step_ends_with_an_error_too() -> None:
    maker, lens = Maker(), torch.ones(4)
    try:
        with one_step():
            maker.used("layer", lens)
            raise RuntimeError("the model failed")
    except RuntimeError:
        pass
    assert maker.spare == [1]
    assert [maker.used("layer", lens), maker.used("layer", lens)] == [2, 3]
