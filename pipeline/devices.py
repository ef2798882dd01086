"""`granular plan --device NAMExN`: about how many hours a run takes on GPUs that are not here.

    seconds = arithmetic / (peak × share),   arithmetic = 2·parameters·tokens + 4·layers·tokens²·width  per row and pass

The peak is the maker's figure for dense bfloat16; the share is what well-filled transformers usually reach. Nothing is
measured, so it is an estimate to choose a machine by; `granular plan --calibrate` measures the device at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.plan import RunPlan, evaluators, passes, round_ledger, validated, validation_ledger
from pipeline.retention import parameters
from pipeline.skeletons import described
from stages.core.errors import GranularError, nearest
from stages.core.spec import read_json
from stages.policies import policy_class

# Dense bfloat16 with float32 sums, 10^12 operations a second, from the makers' data sheets.
TERAFLOPS = {
    "RTX3090": 71, "RTX4090": 165, "RTX5090": 210, "A10": 125, "L40S": 362, "A100": 312, "H100": 989, "H200": 989,
    "B200": 2250,
}  # fmt: skip
SHARE = 0.4
# An autoencoder of FLUX's or SD3's size, per pixel decoded (two operations a multiplication); ViT-H-14 at 224², with
# its text tower.
DECODE, SCORE = 9.5e6, 4e11
GRADIENT = 3  # a forward and a backward pass; one more forward where activations are computed again


@dataclass(frozen=True)
class Device:
    """`count` devices of one kind."""

    name: str
    count: int

    @classmethod
    def parse(cls, text: str) -> Device:
        """`H200x16`, `RTX4090`.

        Raises:
            GranularError: an unknown name, or no count behind the x.
        """
        name, _, count = text.replace("×", "x").partition("x")
        known = {one.lower(): one for one in TERAFLOPS}
        if name.lower() not in known:
            raise GranularError(f"--device {text}: no such device in the table; {nearest(name, TERAFLOPS)}")
        if count and not (count.isdigit() and int(count)):
            raise GranularError(f"--device {text}: expected NAME or NAMExCOUNT, such as H200x8.")
        return cls(known[name.lower()], int(count or 1))


@dataclass(frozen=True)
class Hours:
    """Hours of one run, by what they are spent on."""

    sampling: float
    update: float
    decoding: float
    scoring: float
    validation: float

    @property
    def total(self) -> float:
        return self.sampling + self.update + self.decoding + self.scoring + self.validation


def hours(run: RunPlan, device: Device) -> Hours:
    """Predicted hours. Work is divided evenly between the devices; loading, swapping and waiting are not counted."""
    per_hour = TERAFLOPS[device.name] * 1e12 * SHARE * device.count * 3600
    row = pass_operations(run) * passes(run)
    decode = DECODE * run.policy.height * run.policy.width
    rounds = [round_ledger(run, number) for number in range(1, run.rounds + 1)]
    again = run.policy.checkpointing
    once = validation_ledger(run)
    times = sum(validated(run, number) for number in range(run.rounds + 1))
    images = sum(one.images for one in rounds)
    update = sum(one.with_gradient * (GRADIENT + again) + one.frozen for one in rounds)
    return Hours(
        sampling=sum(one.evaluations for one in rounds) * row / per_hour,
        update=update * row / per_hour,
        decoding=images * decode / per_hour,
        scoring=images * len(run.rewards) * SCORE / per_hour,
        validation=times
        * (once.evaluations * row + once.images * (decode + len(evaluators(run.scorers)) * SCORE))
        / per_hour,
    )


def pass_operations(run: RunPlan) -> float:
    """Operations of one transformer pass over one row."""
    base = described(Path(run.policy.base))
    geometry = policy_class(run.policy.family).measure(run.policy, base)
    config = read_json(base / "transformer" / "config.json")
    tokens = geometry.rows * geometry.columns + geometry.text_tokens
    width = config["attention_head_dim"] * config["num_attention_heads"]
    layers = config["num_layers"] + config.get("num_single_layers", 0)
    return 2 * parameters(base / "transformer") * tokens + 4 * layers * tokens**2 * width


def told(run: RunPlan, device: Device) -> str:
    """One line for people."""
    found = hours(run, device)
    parts = ", ".join(f"{name} {getattr(found, name):.3g} h" for name in found.__dataclass_fields__)
    return (
        f"on {device.count}×{device.name}: about {found.total:.3g} hours ({parts}), if {SHARE:.0%} of "
        f"{TERAFLOPS[device.name]} bfloat16 TFLOP/s are reached"
    )
