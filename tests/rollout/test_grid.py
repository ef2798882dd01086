"""The noise levels equal the printed tables and refuse everything that does not fall."""

import pytest

from stages.core.errors import GranularError
from stages.core.spec import build
from stages.rollout.grid import Grid, GridSpec, make_grid, shifted

# T = 16, shift 3 (DanceGRPO, MixGRPO and G²RPO on FLUX).
FLUX_16 = (
    *(1.000000, 0.978261, 0.954545, 0.928571, 0.900000, 0.868421, 0.833333, 0.794118, 0.750000),
    *(0.700000, 0.642857, 0.576923, 0.500000, 0.409091, 0.300000, 0.166667, 0.0),
)
TIMES_16 = (1000, 978, 954, 928, 900, 868, 833, 794, 750, 700, 642, 576, 500, 409, 300, 166)
TIMES_25 = (
    *(1000, 986, 971, 956, 940, 923, 904, 885, 864, 842, 818, 792, 764, 734, 702, 666, 627, 585, 538, 486, 428),
    *(363, 290, 206, 111),
)
# diffusers' SD3 scheduler at 10 steps, shift 3.
SD3_10 = (1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0)


def test_the_flux_grid_equals_the_printed_table():
    assert make_grid(GridSpec(steps=16)).sigmas == pytest.approx(FLUX_16, abs=1e-6)


@pytest.mark.parametrize(("steps", "expected"), [(16, TIMES_16), (25, TIMES_25)])
def test_truncated_model_times_equal_the_printed_integers(steps, expected):
    grid = make_grid(GridSpec(steps=steps, model_time="truncated"))
    assert [1000 * grid.time(sigma) for sigma in grid.sigmas[:-1]] == list(expected)


def test_exact_model_time_is_sigma_itself():
    grid = make_grid(GridSpec(steps=16))
    assert [grid.time(sigma) for sigma in grid.sigmas] == list(grid.sigmas)


def test_the_sd3_grid_equals_the_printed_table_and_diffusers_own():
    from diffusers import FlowMatchEulerDiscreteScheduler

    ours = make_grid(GridSpec(steps=10, family="sd3")).sigmas
    assert ours == pytest.approx(SD3_10, abs=1e-6)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    assert ours == pytest.approx(scheduler.sigmas.tolist(), abs=1e-6)


def test_shift_one_is_the_uniform_grid():
    assert make_grid(GridSpec(steps=4, shift=1.0)).sigmas == (1.0, 0.75, 0.5, 0.25, 0.0)


def test_the_shift_is_undone_by_its_inverse():
    for u in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert shifted(shifted(u, 3.0), 1 / 3) == pytest.approx(u, abs=1e-15)


@pytest.mark.parametrize("steps", [2, 7, 16, 25])
def test_whole_indices_are_the_grid_itself_and_others_lie_between(steps):
    grid = make_grid(GridSpec(steps=steps))
    assert tuple(grid.at(float(i)) for i in range(steps + 1)) == grid.sigmas
    assert all(grid.sigmas[i] > grid.at(i + 0.3) > grid.at(i + 0.6) > grid.sigmas[i + 1] for i in range(steps))


def test_between_the_points_of_another_grid_nothing_is_known():
    for grid in (make_grid(GridSpec(steps=4, family="sd3")), Grid((1.0, 0.5, 0.0))):
        with pytest.raises(GranularError, match="'linear' only"):
            grid.at(0.5)


@pytest.mark.parametrize("steps", [2, 3, 8, 50, 1000])
def test_every_grid_falls_strictly_from_one_to_zero(steps):
    for family in ("linear", "sd3"):
        sigmas = make_grid(GridSpec(steps=steps, family=family)).sigmas
        assert sigmas[0] == 1
        assert sigmas[-1] == 0
        assert len(sigmas) == steps + 1
        assert sorted(set(sigmas), reverse=True) == list(sigmas)


@pytest.mark.parametrize(
    "sigmas", [(0.0, 0.5, 1.0), (1.0, 0.5, 0.5, 0.0), (1.0, 0.5), (1.2, 0.5, 0.0), (1.0, 0.0), (), (1.0, -0.1, 0.0)]
)
def test_a_table_that_is_not_strictly_decreasing_to_zero_is_refused(sigmas):
    with pytest.raises(GranularError, match="fall strictly"):
        Grid(sigmas)


def test_one_step_is_refused_by_its_spec():
    with pytest.raises(GranularError, match="steps"):
        build(GridSpec, {"steps": 1}, "grid")
