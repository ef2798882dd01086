"""The trainer equals a slow loop, is blind to tiling, shares parents, and stops itself when a number is wrong."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from stages.advantage.stage import advantages
from stages.core.errors import GateError
from stages.methods import build
from stages.rollout.grid import Grid
from stages.update.gradient import MEASURED, gradient
from stages.update.points import gather
from stages.update.ppo import PPO
from stages.update.spec import OptimizerSpec
from stages.update.trainer import train
from tests.update.toy import Net, Policy, conditions, roll, score

G2RPO = {"name": "g2rpo", "granularities": [1, 2]}
METHODS = [
    G2RPO,
    G2RPO | {"update": "B"},
    {"name": "dancegrpo"},
    {"name": "dancegrpo", "variant": "as_in_g2rpo", "optimizer_steps": 1},
    {"name": "mixgrpo", "window": 2},
]
OPTIMIZER = OptimizerSpec(lr=1e-2, betas=(0.9, 0.99), weight_decay=1e-2, max_grad_norm=1e-3)


def sampled(method: dict, group: int = 4, **options):
    """A policy, and the points of a round it sampled."""
    policy = Policy()
    rollout = roll(policy, method, group=group, **options)
    table, _ = advantages(
        rollout, {"a": score(rollout), "b": score(rollout, 1)}, {"a": 1, "b": 1}, build(method).credit
    )
    policy.calls.clear()
    return policy, gather(rollout, table, Grid(tuple(rollout.attrs["sigmas"])))


def update(policy, points, method=G2RPO, update_batch: int = 5, **options):
    chosen = {"objective": build(method).objective, "optimizer": OPTIMIZER, "moments": {}, "max_batch": 4, **options}
    return train(policy, points, conditions(), update_batch=update_batch, **chosen)


def weights(policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.module.state_dict().items()}


def slow_loss(module, points, row, clip: float):
    """One point's loss, with torch.distributions and nothing shared."""
    edge = points.table.iloc[row]
    x, old = (torch.from_numpy(array[int(edge["parent"])]).double() for array in (points.x, points.v))
    time = torch.tensor([points.time[int(edge["parent"])]], dtype=torch.float64)
    condition = conditions().values[points.condition[int(edge["parent"])]].double().reshape(1)
    v = module(x[None], time, condition)[0]
    new = Normal(edge["a"] * x + edge["kappa"] * v, edge["std"])
    behaviour = Normal(edge["a"] * x + edge["kappa"] * old, edge["std"])
    sample = torch.from_numpy(points.next_x[int(edge["next"])]).double()
    ratio = (new.log_prob(sample).mean() - behaviour.log_prob(sample).mean()).exp()
    surrogate = torch.stack([ratio, ratio.clamp(1 - clip, 1 + clip)]) * -edge["advantage"]
    return edge["weight"] * surrogate.max()


def slow_update(module, points, spec: OptimizerSpec, clip: float) -> None:
    """The whole update, one sample at a time."""
    adam = torch.optim.AdamW(
        module.parameters(), lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
    )
    for number in sorted(set(points.table["optimizer_step"])):
        adam.zero_grad()
        for row in np.flatnonzero(points.table["optimizer_step"] == number):
            slow_loss(module, points, row, clip).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), spec.max_grad_norm)
        adam.step()


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("max_grad_norm", [1e-3, 1e3])
def test_the_update_equals_a_slow_loop_over_single_samples(method, max_grad_norm):
    policy, points = sampled(method)
    slow = Net().double()
    policy.module.double()
    optimizer = replace(OPTIMIZER, max_grad_norm=max_grad_norm)
    update(policy, points, method, update_batch=3, optimizer=optimizer)
    slow_update(slow, points, optimizer, clip=1e-4)
    for name, tensor in policy.module.state_dict().items():
        torch.testing.assert_close(tensor, slow.state_dict()[name], atol=1e-9, rtol=1e-9)
        assert not torch.equal(tensor, Net().double().state_dict()[name])


def step_gradient(policy, points, number: int = 0, update_batch: int = 64) -> dict[str, torch.Tensor]:
    measured = {name: np.zeros(len(points.table)) for name in MEASURED}
    step = points.steps(update_batch)[number]
    loss = gradient(policy, points, step, conditions(), PPO(), update_batch, measured)
    return {name: parameter.grad.clone() for name, parameter in policy.module.named_parameters()} | {"loss": loss}


@pytest.mark.parametrize("method", [G2RPO | {"update": "B"}, {"name": "mixgrpo", "window": 2}], ids=str)
def test_the_sum_of_micro_batch_gradients_is_the_full_gradient_for_any_tiling(method):
    policy, points = sampled(method, prompts=(7, 3))
    policy.module.double()
    whole = step_gradient(policy, points)
    for update_batch in (1, 2, 3, 4, 5, 7):
        tiled = step_gradient(policy, points, update_batch=update_batch)
        assert tiled.pop("loss") == pytest.approx(whole["loss"], abs=1e-12)
        for name, grad in tiled.items():
            torch.testing.assert_close(grad, whole[name], atol=1e-14, rtol=1e-10)


def test_the_same_update_twice_is_bit_equal():
    results = []
    for _ in range(2):
        policy, points = sampled(G2RPO)
        result = update(policy, points)
        results.append((weights(policy), result.transitions))
    assert all(torch.equal(a, b) for a, b in zip(results[0][0].values(), results[1][0].values()))
    assert results[0][1].equals(results[1][1])


def test_padding_never_changes_a_gradient():
    """Rows beyond the last parent take part in the forward only: what fills them does not matter, bit for bit."""
    policy, points = sampled(G2RPO)
    before = step_gradient(policy, points, update_batch=8)
    velocity = policy.velocity

    def other_padding(x, time, rows):
        count = points.steps(8)[0].parents
        x = torch.cat([x[:count], torch.full_like(x[count:], 0.3)])
        return velocity(x, time, rows)

    policy.velocity = other_padding
    after = step_gradient(policy, points, update_batch=8)
    assert all(torch.equal(torch.as_tensor(after[name]), torch.as_tensor(before[name])) for name in before)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_children_of_a_parent_share_one_velocity(method):
    policy, points = sampled(method)
    update(policy, points, method, update_batch=1)
    expected = sum(step.parents for step in points.steps(1))
    assert policy.calls == [1] * expected
    if method["name"] == "g2rpo":
        assert expected == len(points.table) / 4


def test_every_forward_with_gradient_has_the_same_rows():
    policy, points = sampled(G2RPO)
    update(policy, points, update_batch=5)
    assert set(policy.calls) == {5}


def test_variant_a_takes_a_step_per_trained_step_and_b_one():
    for variant, count in (("A", 3), ("B", 1)):
        method = G2RPO | {"update": variant}
        policy, points = sampled(method)
        result = update(policy, points, method)
        assert len(result.steps) == count
        assert {int(parts["step"]) for parts in result.moments.values()} == {count}


def test_the_gradient_of_b_is_the_mean_of_the_gradients_of_a():
    policy, points_a = sampled(G2RPO)
    _, points_b = sampled(G2RPO | {"update": "B"})
    policy.module.double()
    separate = [step_gradient(policy, points_a, number) for number in range(3)]
    together = step_gradient(policy, points_b)
    assert together.pop("loss") == pytest.approx(np.mean([step["loss"] for step in separate]), abs=1e-12)
    for name, grad in together.items():
        torch.testing.assert_close(grad, sum(step[name] for step in separate) / 3, atol=1e-15, rtol=1e-9)


def test_on_policy_the_gradient_is_that_of_one_inner_product_per_parent():
    """∇loss = −(κ/(std·D))·∇⟨v_θ(x), ē⟩ with ē = Σ wᵢAᵢεᵢ: the averaged noise is all that counts."""
    policy, points = sampled(G2RPO)
    policy.module.double()
    # The behaviour's velocities in float64, so that the ratio is exactly 1.
    with torch.no_grad():
        v = policy.velocity(
            torch.from_numpy(points.x).double(),
            torch.from_numpy(points.time),
            conditions().rows(torch.from_numpy(points.condition)),
        )
    points = replace(points, v=v.numpy())
    found = step_gradient(policy, points, number=1)
    found.pop("loss")
    policy.module.zero_grad()
    total = 0.0
    for row in np.flatnonzero(points.table["optimizer_step"] == 1):
        edge = points.table.iloc[row]
        parent = int(edge["parent"])
        x = torch.from_numpy(points.x[[parent]]).double()
        mean = edge["a"] * x + edge["kappa"] * v[parent]
        noise = (torch.from_numpy(points.next_x[[int(edge["next"])]]).double() - mean) / edge["std"]
        place = conditions().rows(torch.from_numpy(points.condition[[parent]]))
        now = policy.velocity(x, torch.from_numpy(points.time[[parent]]), place)
        factor = edge["weight"] * edge["advantage"] * edge["kappa"] / (edge["std"] * noise.numel())
        total = total - factor * (now * noise).sum()
    total.backward()
    for name, parameter in policy.module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-15, rtol=1e-9)


def test_log_ratios_equal_their_closed_form():
    """log ρ = (1/D)·[(κ/std)⟨ε, Δv⟩ − κ²/(2std²)‖Δv‖²] at the second optimizer step."""
    policy, points = sampled(G2RPO)
    policy.module.double()
    result = update(policy, points, optimizer=replace(OPTIMIZER, max_grad_norm=1e3))
    first = result.transitions["optimizer_step"] == 0
    assert result.transitions.loc[first, "log_ratio"].abs().max() < 1e-7
    # After step 0 only: the policy that step 1 saw.
    policy, points = sampled(G2RPO)
    policy.module.double()
    part = replace(points, table=points.table[points.table["optimizer_step"] == 0].reset_index(drop=True))
    update(policy, part, optimizer=replace(OPTIMIZER, max_grad_norm=1e3))
    table = points.table[points.table["optimizer_step"] == 1]
    rows = table["parent"].to_numpy()
    x, old, sample = (
        torch.from_numpy(array).double() for array in (points.x[rows], points.v[rows], points.next_x[table["next"]])
    )
    with torch.no_grad():
        now = policy.velocity(
            x, torch.from_numpy(points.time[rows]), conditions().rows(torch.from_numpy(points.condition[rows]))
        )
    a, kappa, std = (torch.from_numpy(table[name].to_numpy()).reshape(-1, 1, 1) for name in ("a", "kappa", "std"))
    noise, change = (sample - a * x - kappa * old) / std, now - old
    expected = (kappa / std * noise * change - (kappa / std * change) ** 2 / 2).mean((1, 2))
    measured = result.transitions.loc[result.transitions["optimizer_step"] == 1, "log_ratio"]
    np.testing.assert_allclose(measured, expected.numpy(), rtol=1e-9, atol=1e-15)


def test_shares_and_norms_re_sum_to_the_parents_gradient():
    """∂L/∂v of every point by hand; a parent's sum explains all of its gradient, and its shares sum to one."""
    policy, points = sampled(G2RPO | {"update": "B"})
    policy.module.double()
    result = update(policy, points, G2RPO | {"update": "B"}, update_batch=3)
    kept = Net().double()
    vectors = []
    for row in range(len(points.table)):
        grads = []
        hook = kept.register_forward_hook(
            lambda module, given, out, grads=grads: grads.append(out) or out.retain_grad()
        )
        slow_loss(kept, points, row, 1e-4).backward()
        hook.remove()
        vectors.append(grads[0].grad.numpy().reshape(-1))
    vectors = np.stack(vectors)
    np.testing.assert_allclose(result.transitions["velocity_grad_norm"], np.linalg.norm(vectors, axis=1), rtol=1e-6)
    for parent in set(points.table["parent"]):
        rows = np.flatnonzero(points.table["parent"] == parent)
        total = vectors[rows].sum(0)
        shares = result.transitions["share"].to_numpy()[rows]
        assert shares.sum() == pytest.approx(1, abs=1e-12)
        np.testing.assert_allclose(shares, vectors[rows] @ total / (total @ total), rtol=1e-6)


def without_advantage(points, steps):
    table = points.table.assign(
        advantage=points.table["advantage"].where(~points.table["optimizer_step"].isin(steps), 0.0)
    )
    return replace(points, table=table)


def test_a_step_without_any_advantage_is_skipped_and_counted():
    policy, points = sampled(G2RPO)
    result = update(policy, without_advantage(points, [0, 2]))
    assert [step["skipped"] for step in result.steps] == [True, False, True]
    assert {int(parts["step"]) for parts in result.moments.values()} == {1}
    skipped = result.transitions["optimizer_step"] != 1
    assert result.transitions.loc[skipped, "ratio"].isna().all()
    assert (result.transitions.loc[skipped, "velocity_grad_norm"] == 0).all()


def test_a_round_without_any_advantage_changes_nothing_not_even_by_decay():
    policy, points = sampled(G2RPO)
    before = weights(policy)
    result = update(policy, without_advantage(points, [0, 1, 2]))
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(policy).items())
    assert result.param_change == 0
    assert result.moments == {}
    assert policy.calls == []


def test_points_with_advantage_zero_have_no_gradient():
    policy, points = sampled(G2RPO)
    table = points.table.assign(advantage=points.table["advantage"].where(points.table["member"] > 0, 0.0))
    result = update(policy, replace(points, table=table))
    zero = result.transitions["member"] == 0
    assert (result.transitions.loc[zero, "velocity_grad_norm"] == 0).all()
    free = ~zero & (result.transitions["clip_side"] == 0)
    assert (result.transitions.loc[free, "velocity_grad_norm"] > 0).all()


def test_the_record_says_what_the_transitions_say():
    policy, points = sampled(G2RPO)
    result = update(policy, points)
    for record in result.steps:
        rows = result.transitions[result.transitions["optimizer_step"] == record["optimizer_step"]]
        assert record["points"] == len(rows)
        assert record["ratio_min"] == rows["ratio"].min()
        assert record["ratio_max"] == rows["ratio"].max()
        assert record["clip_fraction"] == pytest.approx((rows["clip_side"] != 0).mean())
        assert record["param_change"] > 0
        assert record["grad_norm"] > 0
    assert result.param_change <= sum(record["param_change"] for record in result.steps) * (1 + 1e-6)
    assert result.transitions["clip_side"].ne(0).any()  # the later steps are off-policy at this learning rate


def refused(policy, points, message: str, **options) -> None:
    before = weights(policy)
    with pytest.raises(GateError, match=message):
        update(policy, points, **options)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(policy).items())
    assert all(parameter.grad is None for parameter in policy.module.parameters())


def test_a_first_ratio_that_is_not_one_stops_the_run_and_names_the_rows():
    policy, points = sampled(G2RPO)
    with torch.no_grad():
        policy.module.leave += 1e-3
    refused(policy, points, r"before the first optimizer step \d+ of 8 ratios .* at prompt \d, s 0, member \d")


def test_a_first_ratio_is_one_for_every_tiling():
    for update_batch in (1, 3, 8, 32):
        policy, points = sampled(G2RPO)
        first = update(policy, points, update_batch=update_batch).transitions
        assert (first.loc[first["optimizer_step"] == 0, "ratio"] - 1).abs().max() <= 1e-6


def test_a_gradient_that_is_not_finite_names_its_rows_and_leaves_the_state_untouched():
    policy, points = sampled(G2RPO)
    velocity = policy.velocity

    def broken(x, time, rows):
        """The second trained step sees a velocity that overflows for the second prompt."""
        v = velocity(x, time, rows).clone()
        if torch.is_grad_enabled():
            v[(time < 0.95) & (time > 0.9) & (rows.values > 0)] = torch.inf
        return v

    policy.velocity = broken
    refused(policy, points, "the gradient is not finite at prompt 3, s 1, member 0; prompt 3, s 1, member 1")


def test_a_network_whose_gradient_overflows_is_refused_too():
    policy, points = sampled(G2RPO)
    policy.module.enter.register_hook(lambda grad: grad * float("nan"))
    refused(policy, points, "the weights' gradient is not finite after the rows prompt 7, s 0, member 0")


def test_an_update_that_changes_no_weight_is_refused():
    policy, points = sampled(G2RPO)
    refused(
        policy, points, "changed no weight at lr 1e-30", optimizer=replace(OPTIMIZER, lr=1e-30)
    )  # fmt: skip


def test_a_sampler_that_does_not_see_the_new_weights_is_refused():
    policy, points = sampled(G2RPO)
    velocity, frozen = policy.velocity, Policy()

    def stale(x, time, rows):
        return velocity(x, time, rows) if torch.is_grad_enabled() else frozen.velocity(x, time, rows)

    policy.velocity = stale
    refused(policy, points, "the sampler does not use the trained weights")


def test_an_interruption_leaves_the_weights_as_they_were():
    policy, points = sampled(G2RPO)
    before = weights(policy)

    def stop(parents: int) -> None:
        if len(policy.calls) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        update(policy, points, progress=stop)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(policy).items())
