"""A function of one's own as a scorer: its answers are rewards, and whatever goes wrong is a failure with a reason."""

from pathlib import Path

import numpy as np
import pytest

from stages.core.errors import GranularError
from stages.core.types import Reward
from stages.reward.callable import Options, load
from stages.reward.scoring import score_images

IMAGES = np.arange(5, dtype=np.float32)[:, None, None, None] / 8 + np.zeros((1, 2, 2, 3), np.float32)
PROMPTS = [f"p{i}" for i in range(5)]
METADATA = [{"weight": i, "inner": {"seen": 0}} for i in range(5)]
MEANS = "def score(*, images, prompts, metadata):\n    return [float(image.mean()) for image in images]\n"


def made(tmp_path: Path, code: str, function: str = "score", batch: int = 8):
    (tmp_path / "my_rewards.py").write_text(code)
    return load(tmp_path / "my_rewards.py", batch, "cpu", Options(function=function))


def answers(tmp_path: Path, body: str) -> list[Reward]:
    """What becomes of the answers of a function with this body, through the reward stage's own loop."""
    code = f"import numpy as np\n\ndef score(*, images, prompts, metadata):\n    {body}\n"
    return score_images(made(tmp_path, code), IMAGES, PROMPTS, METADATA, label="test")


def test_numbers_are_rewards_and_rows_stand_alone(tmp_path):
    scorer = made(tmp_path, MEANS, batch=2)
    together = score_images(scorer, IMAGES, PROMPTS, METADATA, label="test")
    assert [reward.value for reward in together] == [float(image.mean()) for image in IMAGES]
    backwards = score_images(scorer, IMAGES[::-1], PROMPTS[::-1], METADATA[::-1], label="test")
    assert backwards == together[::-1]
    assert scorer.score(images=IMAGES[:0], prompts=[], metadata=[]) == []


def test_each_image_comes_with_its_own_prompt_and_metadata(tmp_path):
    rewards = answers(tmp_path, "return [m['weight'] + 10 * int(p[1:]) for p, m in zip(prompts, metadata)]")
    assert [reward.value for reward in rewards] == [0, 11, 22, 33, 44]


@pytest.mark.parametrize(
    "body", ["return images.mean((1, 2, 3))", "import torch; return torch.from_numpy(images).mean((1, 2, 3))"]
)
def test_arrays_are_answers_too(tmp_path, body):
    assert [reward.value for reward in answers(tmp_path, body)] == [float(image.mean()) for image in IMAGES]


def test_rewards_pass_through_and_none_is_a_missing_one(tmp_path):
    body = "from stages.core.types import Reward; r = Reward(2.0, reason='why', parts=(('x', 1.0),)); "
    rewards = answers(tmp_path, body + "return [r, Reward.failed('no'), None, 1, True]")
    assert rewards[0] == Reward(2.0, reason="why", parts=(("x", 1.0),))
    assert [reward.status for reward in rewards] == ["ok", "failed", "missing", "ok", "ok"]
    assert rewards[2].value is None and rewards[2].reason == "my_rewards.py:score had no answer"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("float('nan')", "answered nan"),
        ("float('inf')", "answered inf"),
        ("'1.0'", "answered a text, '1.0'"),
        ("[1, 2]", "answered no number (TypeError"),
    ],
)
def test_what_is_no_number_fails_in_its_own_row(tmp_path, answer, reason):
    rewards = answers(tmp_path, f"return [1.0, {answer}, 1.0, 1.0, 1.0]")
    assert [reward.status for reward in rewards] == ["ok", "failed", "ok", "ok", "ok"]
    assert rewards[1].value is None and reason in rewards[1].reason


def test_an_exception_costs_the_row_it_belongs_to(tmp_path):
    rewards = answers(tmp_path, "return [1 / m['weight'] for m in metadata]")
    assert [reward.status for reward in rewards] == ["failed", "ok", "ok", "ok", "ok"]
    assert "my_rewards.py:score raised ZeroDivisionError" in rewards[0].reason


@pytest.mark.parametrize("body", ["return [1.0]", "return [1.0] * (len(images) + 1)", "return []"])
def test_a_wrong_number_of_answers_is_no_answer(tmp_path, body):
    rewards = answers(tmp_path, body)
    assert {reward.status for reward in rewards} == {"failed"}
    assert "answers for 5 images" in rewards[0].reason


@pytest.mark.parametrize("body", ["return 1.0", "return None", "pass"])
def test_no_list_at_all_is_a_failure(tmp_path, body):
    assert {reward.status for reward in answers(tmp_path, body)} == {"failed"}


def test_a_function_cannot_change_what_other_scorers_see(tmp_path):
    images = IMAGES.copy()
    metadata = [{"inner": {"seen": 0}} for _ in images]
    body = "images[:] = 9; [m['inner'].update(seen=1) for m in metadata]; return [0.0] * len(images)"
    code = f"def score(*, images, prompts, metadata):\n    {body}\n"
    score_images(made(tmp_path, code), images, PROMPTS, metadata, label="test")
    assert np.array_equal(images, IMAGES) and metadata == [{"inner": {"seen": 0}}] * 5


def test_an_edited_file_is_another_scorer(tmp_path):
    one = made(tmp_path, MEANS)
    same = made(tmp_path, MEANS)
    other = made(tmp_path, MEANS.replace("mean()", "max()"))
    assert one.identity() == same.identity() != other.identity()
    image = np.linspace(0, 1, 12, dtype=np.float32).reshape(1, 2, 2, 3)
    scores = [s.score(images=image, prompts=["a"], metadata=[{}])[0].value for s in (one, other)]
    assert scores == [pytest.approx(0.5), 1.0]


@pytest.mark.parametrize(
    ("code", "function", "message"),
    [
        (MEANS, "scor", "no function 'scor'; did you mean 'score'"),
        ("score = 1.0\n", "score", "no function 'score'"),
        ("def score(:\n", "score", "cannot be imported .SyntaxError"),
        ("import absent_package\n", "score", "cannot be imported .ModuleNotFoundError"),
    ],
)
def test_a_file_without_the_function_is_one_sentence(tmp_path, code, function, message):
    with pytest.raises(GranularError, match=message):
        made(tmp_path, code, function)


@pytest.mark.parametrize("path", [None, Path("absent.py"), Path(".")])
def test_the_path_is_a_python_file(path):
    with pytest.raises(GranularError, match="needs the path of a Python file"):
        load(path, 8, "cpu", Options())
