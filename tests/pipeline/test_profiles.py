"""Profiles are complete, plan without a single weight, and fit the GPU that their name promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.costs import advice, costs
from pipeline.devices import Device, hours
from pipeline.models import CARDS, command, download, licences, lines, needed
from pipeline.params import load_params, resolve_run
from pipeline.profile import PROFILES, init, profile
from pipeline.skeletons import SKELETONS, described
from stages.core.errors import GranularError


def planned(name):
    params = load_params(profile(name))
    return resolve_run(params, next(iter(params.runs)))


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_is_complete_and_plans_with_no_weights_here(name, tmp_path, monkeypatch):
    params = load_params(profile(name))
    written = tmp_path / "params.yaml"
    init(name, written)
    assert load_params(written).raw == params.raw
    if name == "lab":
        return
    monkeypatch.chdir(tmp_path)
    run = planned(name)
    found = costs(run)
    assert found.total.evaluations > 0 and found.storage["total"] > 0
    assert {"embed", "rollout", "reward", "update"} <= found.memory.keys()
    assert hours(run, Device.parse("H200x8")).total > 0
    assert advice(run) == []


@pytest.mark.parametrize("name", [name for name in PROFILES if "24gb" in name])
def test_a_24_gb_profile_stays_below_22(name):
    found = costs(planned(name))
    peaks = {stage: parts["total"] / 1e9 for stage, parts in found.memory.items()}
    assert max(peaks.values()) <= 22, peaks


def test_the_published_costs_are_those_of_the_papers():
    """G²RPO's appendix and Flow-GRPO's configuration: evaluations of one prompt."""
    assert costs(planned("flux-g2rpo")).prompt.evaluations == 1700
    assert costs(planned("sd35-flowgrpo")).prompt.evaluations == 240
    assert costs(planned("sd35-flowgrpo")).prompt.passes == 480  # guidance takes two


def test_a_learning_rate_of_the_other_kind_of_training_is_warned_about():
    params = load_params(profile("flux-g2rpo"))
    assert "is that of a LoRA" in advice(resolve_run(params, "g2rpo", ["optimizer.lr=1e-4"]))[0]
    params = load_params(profile("flux-lora-24gb"))
    assert "is that of full fine-tuning" in advice(resolve_run(params, "g2rpo", ["optimizer.lr=2e-6"]))[0]


def test_skeletons_have_the_sizes_of_the_real_models():
    from pipeline.retention import parameters

    assert parameters(SKELETONS / "FLUX.1-dev" / "transformer") == 11_901_408_320
    assert parameters(SKELETONS / "FLUX.1-dev" / "text_encoder_2") == pytest.approx(4.762e9, rel=1e-3)
    assert parameters(SKELETONS / "stable-diffusion-3.5-medium" / "transformer") == 2_243_171_520
    assert not list(SKELETONS.rglob("*.safetensors"))


def test_a_base_that_is_here_is_never_replaced_by_a_skeleton(tmp_path):
    base = tmp_path / "FLUX.1-dev"
    assert described(base) == SKELETONS / "FLUX.1-dev"
    base.mkdir()
    (base / "model_index.json").write_text("{}")
    assert described(base) == base
    assert described(tmp_path / "my-model") == tmp_path / "my-model"


def test_devices_are_named_and_counted():
    assert Device.parse("h200x16") == Device("H200", 16)
    assert Device.parse("RTX4090") == Device("RTX4090", 1)
    run = planned("flux-lora-24gb")
    assert hours(run, Device("H100", 2)).total == pytest.approx(hours(run, Device("H100", 1)).total / 2)
    for text in ("H900", "H100x", "H100xmany", "H100x0"):
        if text == "H100x":
            assert Device.parse(text).count == 1
            continue
        with pytest.raises(GranularError, match=r"--device"):
            Device.parse(text)


def test_models_are_listed_with_origin_licence_and_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    params = load_params(profile("flux-lora-24gb"))
    text = "\n".join(lines(params))
    assert "black-forest-labs/FLUX.1-dev" in text and "Non-Commercial" in text and "have to be accepted" in text
    assert "hf download black-forest-labs/FLUX.1-dev" in text and "--local-dir models/FLUX.1-dev" in text
    assert text.count("not here: ") == len(list(needed(params)))
    file = Path("models/HPSv2/HPS_v2.1_compressed.pt")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"weights")
    assert "here, digest " in "\n".join(lines(params))


def test_every_base_and_scorer_of_the_profiles_is_known():
    for name in PROFILES:
        if name != "lab":
            assert all(one.card is not None for one in needed(load_params(profile(name))))
    assert all(card.licence and card.gigabytes > 0 for card in CARDS.values())


def test_a_refused_download_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    params = load_params(profile("flux-lora-24gb"))
    with pytest.raises(GranularError, match=r"FLUX\.1-dev: could not be downloaded .*HF_HUB_OFFLINE=0") as found:
        list(download(params))  # tests are offline
    assert "\n" not in str(found.value)

    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError

    def refused(*args, **options):
        import httpx

        raise GatedRepoError("403", response=httpx.Response(403, request=httpx.Request("GET", "https://x")))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    with pytest.raises(GranularError, match=r"refused; accept its terms on huggingface\.co"):
        list(download(params))


def test_licences_of_known_models_are_recorded():
    found = licences("models/FLUX.1-dev", {"hps": "m/HPSv2/HPS_v2.1_compressed.pt", "own": "x/y", "oracle": None})
    assert found == {"policy": "FLUX.1 [dev] Non-Commercial License", "hps": "Apache-2.0"}


def test_commands_say_what_they_did_or_why_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    done = runner.invoke(app, ["init", "--profile", "sd35-g2rpo-24gb"])
    assert done.exit_code == 0 and "granular plan RUN" in done.stdout
    with pytest.raises(GranularError, match=r"params\.yaml is there already; --force"):
        init("lab", Path("params.yaml"))
    with pytest.raises(GranularError, match="no such profile; did you mean 'flux-g2rpo'"):
        init("flux-g2rp", Path("other.yaml"))
    done = runner.invoke(app, ["plan", "g2rpo", "--device", "RTX4090", "--json"])
    values = json.loads(done.stdout)
    assert values["hours"]["total"] > 0 and values["memory_bytes"]["update"]["total"] > 0


def test_what_a_command_of_the_list_downloads_is_what_is_looked_for():
    params = load_params(profile("flux-lora-24gb"))
    by_use = {one.use: command(one) for one in needed(params)}
    assert "--include 'HPS_v2.1_compressed.pt' --local-dir models/HPSv2" in by_use["scorers.hps"]
