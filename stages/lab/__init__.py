"""The embedded lab: a tiny FLUX on coloured shapes with an exact oracle, so that the pipeline runs on two CPU cores.

    grammar      every prompt that exists (GenEval metadata, GenEval's six tags)
    scenes       a prompt becomes a symbolic scene, a scene becomes 32 x 32 pixels
    oracle       pixels become a verdict: does the image show what the prompt says? (never sees the scene)
    autoencoder  8 x 8 pixel patches <-> latents, with AutoencoderKL's interface
    pipeline     a real diffusers FluxPipeline folder; `build_random` makes one with random weights for tests
    scorers      tiny open_clip models in the file formats of the full-size ones
    train_policy, train_scorers, pretrain    `python -m stages.lab` trains everything again from a seed

The shipped weights are in `data/lab/policy` (a FluxPipeline folder) and `data/lab/scorers/{clip,hps,clip_other}`;
`data/lab/card.json` holds the figures measured on them.

Honesty: like a real base model, the base policy and the scorers have seen captions of *all* prompts of this world.
Reinforcement learning uses the train prompts only, so test prompts measure what RL generalises, not what it saw.
"""
