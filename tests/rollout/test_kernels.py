"""Step kernels equal the printed numbers and the formulas as the released codes write them."""

import math

import pytest
import torch

from stages.core.types import Transition
from stages.rollout.grid import GridSpec, make_grid
from stages.rollout.kernels import KERNELS, ODE, Kernel

GRID = make_grid(GridSpec(steps=16))
FLOW, DANCE, CPS = Kernel("flow_sde", 0.7), Kernel("dance_sde", 0.3), Kernel("cps", 0.7)

# T = 16, shift 3, η = 0.7: s, dt, g, std, a, κ, c, |κ|/std, std of Dance-SDE with η = 0.3.
TABLE = """
0 -0.021739 4.7476 0.700000 0.755000 -0.021739 0.733261 0.0311 0.0442
1 -0.023715 4.6957 0.723135 0.732727 -0.029526 0.687273 0.0408 0.0462
2 -0.025974 3.2078 0.516984 0.860000 -0.032338 0.788571 0.0626 0.0483
3 -0.028571 2.5239 0.426615 0.902000 -0.035571 0.802000 0.0834 0.0507
4 -0.031579 2.1000 0.373180 0.922632 -0.039316 0.791053 0.1054 0.0533
5 -0.035088 1.7983 0.336859 0.934667 -0.043684 0.768000 0.1297 0.0562
6 -0.039216 1.5652 0.309965 0.942353 -0.048824 0.736471 0.1575 0.0594
7 -0.044118 1.3748 0.288760 0.947500 -0.054926 0.697500 0.1902 0.0630
8 -0.050000 1.2124 0.271109 0.951000 -0.062250 0.651000 0.2296 0.0671
9 -0.057143 1.0693 0.255604 0.953333 -0.071143 0.596190 0.2783 0.0717
10 -0.065934 0.9391 0.241151 0.954769 -0.082088 0.531692 0.3404 0.0770
11 -0.076923 0.8174 0.226713 0.955455 -0.095769 0.455455 0.4224 0.0832
12 -0.090909 0.7000 0.211058 0.955455 -0.113182 0.364545 0.5363 0.0905
13 -0.109091 0.5824 0.192372 0.954769 -0.135818 0.254769 0.7060 0.0991
14 -0.133333 0.4583 0.167332 0.953333 -0.166000 0.120000 0.9920 0.1095
15 -0.166667 0.3130 0.127802 0.951000 -0.207500 -0.049000 1.6236 0.1225
"""
ROWS = [tuple(float(number) for number in line.split()) for line in TABLE.strip().splitlines()]

# x = 0.8, v = −0.3, ε = 0.5: s, ODE x', Flow mean, x', log p, Dance mean, x', log p.
SCALARS = [
    (0, 0.806522, 0.610522, 0.960522, -0.687264, 0.805739, 0.827855, 2.074355),
    (1, 0.807115, 0.595040, 0.956607, -0.719780, 0.806249, 0.829349, 2.030849),
    (3, 0.808571, 0.732271, 0.945579, -0.192064, 0.807493, 0.832848, 1.937708),
    (7, 0.813235, 0.774478, 0.918858, 0.198221, 0.811390, 0.842896, 1.720482),
]
# The same input: s, CPS mean, std, x'.
CPS_SCALARS = [
    (0, 0.379210, 0.871637, 0.815028),
    (3, 0.425975, 0.801906, 0.826928),
    (7, 0.510923, 0.668255, 0.845050),
    (15, 0.850000, 0.0, 0.850000),
]
# SD3 grid of 10 steps, η = 0.7: s, Flow a, c, std, κ, c² + std², κ/std; CPS c, std, κ/std (without noise: nan).
SD3 = """
0 .755000 .715129 .700000 -.039871 1.0014 -.0570 .435890 .855481 -.0466
1 .712541 .625890 .742964 -.058242 .9437 -.0784 .414652 .813800 -.0819
2 .842635 .700327 .536152 -.069293 .7779 -.1292 .389384 .764209 -.1259
3 .884093 .674462 .445897 -.083818 .6537 -.1880 .358820 .704223 -.1828
4 .902892 .610170 .391794 -.103447 .5258 -.2640 .321098 .630190 -.2603
5 .912011 .514161 .352797 -.130884 .3888 -.3710 .273371 .536520 -.3753
6 .915465 .380341 .319070 -.170907 .2465 -.5356 .211049 .414208 -.5752
7 .914463 .192512 .282007 -.232600 .1166 -.8248 .126232 .247743 -1.0820
8 .908672 -.082400 .225360 -.335055 .0576 -1.4867 .004053 .007955 -34.27
9 .997793 -.002207 .006278 -.011116 .00004 -1.7706 0 0 nan
"""
SD3_ROWS = [tuple(float(number) for number in line.split()) for line in SD3.strip().splitlines()]
SD3_GRID = make_grid(GridSpec(steps=10, family="sd3"))


def step(kernel: Kernel, s: int, grid=GRID):
    return kernel.coefficients(grid.sigmas[s], grid.sigmas[s + 1], grid.sigmas[1])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"s{int(row[0])}")
def test_flow_sde_equals_the_printed_coefficients(row):
    s, dt, rate, std, a, kappa, c, weight, dance = int(row[0]), *row[1:]
    made = step(FLOW, s)
    delta = GRID.sigmas[s] - GRID.sigmas[s + 1]
    assert -delta == pytest.approx(dt, abs=5e-7)
    assert (made.a, made.kappa, made.std, made.c) == pytest.approx((a, kappa, std, c), abs=5.001e-7)
    assert made.std / math.sqrt(delta) == pytest.approx(rate, abs=5.1e-5)
    assert abs(made.kappa) / made.std == pytest.approx(weight, abs=5.1e-5)
    assert step(DANCE, s).std == pytest.approx(dance, abs=5.1e-5)


@pytest.mark.parametrize("kernel", [FLOW, DANCE, CPS, ODE], ids=lambda k: k.name)
@pytest.mark.parametrize("s", range(16))
def test_velocity_form_and_prediction_form_are_one_mean(kernel, s):
    sigma, after, made = GRID.sigmas[s], GRID.sigmas[s + 1], step(kernel, s)
    assert made.a == pytest.approx(1 - after + made.c, abs=1e-12)
    assert made.kappa == pytest.approx(made.c * (1 - sigma) - sigma * (1 - after), abs=1e-12)
    x, v = 0.8, -0.3
    predicted = (1 - after) * (x - sigma * v) + made.c * (x + (1 - sigma) * v)
    assert made.a * x + made.kappa * v == pytest.approx(predicted, abs=1e-12)


def test_flow_sde_weighs_the_velocity_by_a_constant_times_dt():
    for s in range(16):
        dt = GRID.sigmas[s + 1] - GRID.sigmas[s]
        assert step(FLOW, s).kappa == pytest.approx(dt if s == 0 else 1.245 * dt, abs=1e-12)
    assert step(FLOW, 0).std == pytest.approx(0.7, abs=1e-12)


@pytest.mark.parametrize("s", range(16))
def test_kernels_equal_the_formulas_of_the_released_codes(s):
    x, v, sigma, after = 0.8, -0.3, GRID.sigmas[s], GRID.sigmas[s + 1]
    dt = after - sigma
    rate = 0.7 * math.sqrt(sigma / (1 - (GRID.sigmas[1] if sigma == 1 else sigma)))
    flow = x * (1 + rate**2 * dt / (2 * sigma)) + v * (1 + rate**2 * (1 - sigma) / (2 * sigma)) * dt
    clean = x - sigma * v
    dance = x + dt * (v + 0.3**2 / 2 * (x - (1 - sigma) * clean) / sigma**2)
    for kernel, mean, std in ((FLOW, flow, rate * math.sqrt(-dt)), (DANCE, dance, 0.3 * math.sqrt(-dt))):
        made = step(kernel, s)
        assert made.a * x + made.kappa * v == pytest.approx(mean, abs=1e-14)
        assert made.std == pytest.approx(std, abs=1e-14)


@pytest.mark.parametrize("row", SCALARS, ids=lambda row: f"s{row[0]}")
def test_scalar_vectors(row):
    s, ode, *rest = row
    x, v, noise = 0.8, -0.3, 0.5
    made = step(ODE, s)
    assert made.a * x + made.kappa * v == pytest.approx(ode, abs=1e-6)
    for kernel, (mean, drawn, log_prob) in ((FLOW, rest[:3]), (DANCE, rest[3:])):
        made = step(kernel, s)
        ours = made.a * x + made.kappa * v
        assert ours == pytest.approx(mean, abs=1e-6)
        assert ours + made.std * noise == pytest.approx(drawn, abs=1e-6)
        transition = Transition(torch.tensor([[ours]]).double(), torch.tensor([made.std]).double())
        sample = torch.tensor([[ours + made.std * noise]]).double()
        assert float(transition.log_prob(sample)) == pytest.approx(log_prob, abs=1e-6)


@pytest.mark.parametrize("row", CPS_SCALARS, ids=lambda row: f"s{row[0]}")
def test_cps_scalar_vectors_and_its_preserved_coefficients(row):
    s, mean, std, drawn = row
    made = step(CPS, s)
    ours = made.a * 0.8 - made.kappa * 0.3
    assert (ours, made.std, ours + made.std * 0.5) == pytest.approx((mean, std, drawn), abs=1e-6)
    assert made.c**2 + made.std**2 == pytest.approx(GRID.sigmas[s + 1] ** 2, abs=1e-12)


@pytest.mark.parametrize("row", SD3_ROWS, ids=lambda row: f"s{int(row[0])}")
def test_coefficients_on_the_sd3_grid(row):
    s, a, c, std, kappa, total, weight, cps_c, cps_std, cps_weight = row
    made, kept = step(FLOW, int(s), SD3_GRID), step(CPS, int(s), SD3_GRID)
    assert (made.a, made.c, made.std, made.kappa) == pytest.approx((a, c, std, kappa), abs=1e-6)
    assert made.c**2 + made.std**2 == pytest.approx(total, abs=5.1e-5)
    assert made.kappa / made.std == pytest.approx(weight, abs=5.1e-5)
    assert (kept.c, kept.std) == pytest.approx((cps_c, cps_std), abs=1e-6)
    if kept.std:
        assert kept.kappa / kept.std == pytest.approx(cps_weight, rel=2e-4, abs=5.1e-5)


def test_flow_sde_leaves_residual_noise_that_cps_does_not():
    """c² + std² against σ'² at the last but one step of 10: what remains in the image."""
    after = SD3_GRID.sigmas[9]
    made, kept = step(FLOW, 8, SD3_GRID), step(CPS, 8, SD3_GRID)
    assert (made.c**2 + made.std**2) / after**2 > 700
    assert kept.c**2 + kept.std**2 == pytest.approx(after**2, abs=1e-12)


def test_for_equal_velocity_change_the_ratio_variance_grows_680_fold():
    weights = [(step(FLOW, s, SD3_GRID).kappa / step(FLOW, s, SD3_GRID).std) ** 2 for s in range(9)]
    assert weights == sorted(weights)
    assert weights[8] / weights[0] == pytest.approx(680, abs=2)


DDIM_STD = {
    "cps": lambda sigma, after: after * math.sin(0.7 * math.pi / 2),
    "ddim_intent": lambda sigma, after: 0.7 * after * math.sqrt(sigma),
    "ddim_literal": lambda sigma, after: 0.7 * after * math.sqrt(1 - sigma),
    "ddim_sigma": lambda sigma, after: 0.7 * after / sigma * math.sqrt(1 - ((1 - sigma) / (1 - after)) ** 2),
}


@pytest.mark.parametrize("name", DDIM_STD)
@pytest.mark.parametrize("grid", [GRID, SD3_GRID], ids=["flux", "sd3"])
def test_ddim_style_steps_mix_the_clean_estimate_the_noise_estimate_and_noise(name, grid):
    x, v, noise = 0.8, -0.3, 0.5
    for s, (sigma, after) in enumerate(zip(grid.sigmas, grid.sigmas[1:])):
        std = DDIM_STD[name](sigma, after)
        expected = (1 - after) * (x - sigma * v) + math.sqrt(max(after**2 - std**2, 0)) * (x + (1 - sigma) * v)
        made = step(Kernel(name, 0.7), s, grid)
        assert made.a * x + made.kappa * v + made.std * noise == pytest.approx(expected + std * noise, abs=1e-14)


@pytest.mark.parametrize("row", CPS_SCALARS, ids=lambda row: f"s{row[0]}")
def test_the_released_cps_log_probability(row):
    """−(x' − mean)² without 1/(2·std²): twice the variance times the quadratic term of the true one."""
    logp = {0: -0.189938, 3: -0.160763, 7: -0.111641, 15: 0.0}[row[0]]
    assert -((step(CPS, row[0]).std * 0.5) ** 2) == pytest.approx(logp, abs=1e-6)


def test_at_sigma_one_the_ddim_schedules_are_what_they_claim():
    """As described the noise is largest at σ = 1; as printed it is 0 there, so its first step cannot be trained."""
    std = {name: [step(Kernel(name, 0.7), s, SD3_GRID).std for s in range(10)] for name in DDIM_STD}
    assert std["ddim_intent"][0] == max(std["ddim_intent"]) == pytest.approx(0.672, abs=5e-4)
    assert std["ddim_sigma"][0] == pytest.approx(std["ddim_intent"][0], abs=1e-12)
    assert std["ddim_literal"][0] == 0
    over = [s for s in range(9) if std["ddim_sigma"][s] > SD3_GRID.sigmas[s + 1]]
    assert over == [7, 8]  # where c would be imaginary


@pytest.mark.parametrize(("s", "log_prob", "log_ratio"), [(0, -1.22632609, -0.00340307), (7, -0.34084174, -0.02104220)])
def test_ratio_vectors(s, log_prob, log_ratio):
    x, old, noise, shift = torch.tensor(
        [[0.8, -0.2, 0.1, 1.3], [-0.3, 0.4, 0.2, -1], [0.5, -1, 0.25, 2], [0.1, 0, -0.05, 0.2]], dtype=torch.float64
    ).split(1)
    made = step(FLOW, s)
    std = torch.tensor([made.std], dtype=torch.float64)
    behaviour = Transition(made.a * x + made.kappa * old, std)
    current = Transition(made.a * x + made.kappa * (old + shift), std)
    sample = behaviour.mean + made.std * noise
    assert float(behaviour.log_prob(sample)) == pytest.approx(log_prob, abs=1e-8)
    assert float(current.log_ratio(behaviour, sample)) == pytest.approx(log_ratio, abs=1e-8)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("s", range(16))
def test_without_noise_every_kernel_is_the_euler_step(name, s):
    made = step(Kernel(name, 0.0), s)
    assert (made.a, made.kappa, made.std) == pytest.approx((1, GRID.sigmas[s + 1] - GRID.sigmas[s], 0), abs=1e-12)


def test_a_step_without_noise_has_a_log_prob_and_does_not_raise():
    """The released codes take the ODE step through the SDE function, log std and all."""
    still = Transition(torch.zeros(1, 2), torch.zeros(1))
    assert not torch.isfinite(still.log_prob(torch.zeros(1, 2))).any()


def test_a_step_must_lower_the_noise_level():
    with pytest.raises(ValueError, match="lower the noise level"):
        FLOW.coefficients(0.5, 0.5, 0.9)


# One-dimensional target N(0, 0.5²) with the exact velocity: the final std is a linear recursion, an exact oracle.
DDIM = [Kernel(f"ddim_{one}", 0.7) for one in ("intent", "literal", "sigma", "sigma_clamped")]
ORACLE = (ODE, FLOW, DANCE, CPS, *DDIM)
FINAL_STD = {
    10: (0.3592, 0.4210, 0.3769, 0.3198, 0.3503, 0.3505, 0.2859, 0.2834),
    40: (0.4645, 0.4794, 0.4685, 0.3913, 0.4527, 0.4399, 0.4045, 0.3673),
    400: (0.4963, 0.4986, 0.4967, 0.4196, 0.4878, 0.4643, 0.4767, 0.4464),
    4000: (0.4996, 0.5000, 0.4996, 0.4249, 0.4944, 0.4654, 0.4908, 0.4823),
}


def final_std(kernel: Kernel, steps: int, spread: float = 0.5) -> float:
    grid = make_grid(GridSpec(steps=steps, family="sd3"))
    variance = 1.0
    for s, sigma in enumerate(grid.sigmas[:-1]):
        made = step(kernel, s, grid)
        total = (1 - sigma) ** 2 * spread**2 + sigma**2
        slope = (sigma - (1 - sigma) * spread**2) / total  # v(x) = slope·x
        variance = (made.a + made.kappa * slope) ** 2 * variance + made.std**2
    return math.sqrt(variance)


@pytest.mark.parametrize("steps", FINAL_STD)
@pytest.mark.parametrize("column", range(8), ids=[kernel.name for kernel in ORACLE])
def test_final_spread_of_a_gaussian_target(steps, column):
    assert final_std(ORACLE[column], steps) == pytest.approx(FINAL_STD[steps][column], abs=6e-5)


def test_on_a_sharp_target_the_residual_noise_of_sde_kernels_shows():
    """N(0, 0.05²) at 10 steps: the kernels that converge to the marginal are the dirtier ones there."""
    found = [final_std(kernel, 10, spread=0.05) for kernel in ORACLE[:5]]
    assert found == pytest.approx([0.015, 0.238, 0.133, 0.013, 0.015], abs=6e-4)
