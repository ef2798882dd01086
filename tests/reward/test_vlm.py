"""Judges behind an OpenAI-compatible endpoint: what they are sent, what is kept, and what is never a number."""

from __future__ import annotations

import json
import re
import threading

import numpy as np
import pytest

from stages.core.errors import GateError, GranularError, passing
from stages.core.images import from_uint8, to_uint8
from stages.core.types import Reward
from stages.reward import transport
from stages.reward.chat import AGAIN
from stages.reward.scoring import score_images
from stages.reward.vlm import Options, VlmScorer, load
from tests.reward.fake_services import JudgeService, image_of, text_of

IMAGES = np.random.default_rng(0).random((6, 4, 5, 3), dtype=np.float32)
PROMPTS = [f"prompt {row}" for row in range(6)]
THREE = "Alignment Score (1-5): 4\nCoherence Score (1-5): 3\nStyle Score (1-5): 2"
RATED = Reward(3.0, parts=(("alignment", 4.0), ("coherence", 3.0), ("style", 2.0)), reply=THREE)
KEY = "sk-hunter2-hunter2"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(transport, "FIRST_WAIT", 0.01)


@pytest.fixture
def service():
    one = JudgeService(THREE)
    one.start()
    yield one
    one.stop()


def scorer_of(service: JudgeService, **changes) -> VlmScorer:
    options = {"model": "UnifiedReward", "timeout": 5.0, "retries": 2, "concurrency": 1, "ask_again": 1, **changes}
    return load(None, 64, "cpu", Options(url=f"http://127.0.0.1:{service.port}/v1", **options))


def score(scorer, count=2):
    return scorer.score(images=IMAGES[:count], prompts=PROMPTS[:count], metadata=[{}] * count)


# --- what is asked, and what is kept ---------------------------------------------------------------------------------


def test_the_judge_sees_the_picture_without_loss_beside_its_own_prompt(service):
    scorer_of(service)  # asks who is there, and nothing else
    assert score(scorer_of(service), 3) == [RATED] * 3
    for row, asked in enumerate(service.asked):
        np.testing.assert_array_equal(image_of(asked), to_uint8(IMAGES[row]))
        assert f"[prompt {row}]" in text_of(asked)
        assert (asked["temperature"], asked["model"]) == (0, "UnifiedReward")
    exact = from_uint8(np.arange(192, dtype=np.uint8).reshape(1, 8, 8, 3))
    scorer_of(service).score(images=exact, prompts=["p"], metadata=[{}])
    np.testing.assert_array_equal(image_of(service.asked[-1]), to_uint8(exact[0]))


def test_answers_come_back_in_the_order_of_the_images(service):
    service.faults = [{"slow": 0.3}, {"slow": 0.15}]
    service.say = lambda asked: f"Final Score: 4.{re.search(r'prompt (.)', text_of(asked))[1]}"
    rewards = score(scorer_of(service, judge="unified_reward", concurrency=4), 6)
    assert [reward.value for reward in rewards] == [4.0, 4.1, 4.2, 4.3, 4.4, 4.5]


def test_no_more_questions_are_under_way_than_allowed(service):
    under_way, most, lock, answer = [0], [0], threading.Lock(), service.post

    def counted(body):
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        threading.Event().wait(0.05)
        with lock:
            under_way[0] -= 1
        return answer(body)

    service.post = counted
    score(scorer_of(service, concurrency=3), 6)
    assert most[0] == 3


def test_an_unreadable_reply_is_asked_for_again_and_both_are_kept(service):
    service.replies = ["What a nice image!", THREE]
    (reward,) = score(scorer_of(service), 1)
    assert reward.value == 3.0 and reward.reply == f"What a nice image!{AGAIN}{THREE}"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("What a nice image!", "unparsable reply: no alignment"),
        ("", "unparsable reply: no alignment"),
        (THREE.replace("3", "NaN"), "unparsable reply: no coherence"),
        (THREE.replace("3", "11"), "unparsable reply: coherence is 11, outside 1 to 5"),
    ],
)
def test_an_unreadable_reply_is_a_failure_that_is_kept(service, words, reason):
    service.replies = [words]
    (reward,) = score(scorer_of(service), 1)
    assert (reward.value, reward.status, reward.reason) == (None, "failed", reason)
    assert reward.reply == f"{words}{AGAIN}{words}" and len(service.asked) == 2


def test_a_reply_that_was_cut_off_is_not_read(service):
    service.finish = "length"
    (reward,) = score(scorer_of(service, max_tokens=20), 1)
    assert reward.value is None and "cut off after 20 tokens" in reward.reason and THREE in reward.reply


def test_a_question_of_one_s_own_is_read_from_a_file(service, tmp_path):
    (tmp_path / "ask.txt").write_text("How much is it {prompt}?")
    service.replies = ["score=70"]
    own = {"judge": "template", "template": str(tmp_path / "ask.txt"), "pattern": r"score=(?P<value>\d+)", "high": 100}
    scorer = scorer_of(service, **own)
    assert score(scorer, 1) == [Reward(70.0, reply="score=70")]
    assert text_of(service.asked[0]) == "How much is it prompt 0?"
    (tmp_path / "ask.txt").write_text("How is it {prompt}?")
    assert scorer_of(service, **own).identity()["question"] != scorer.identity()["question"]


# --- faults ----------------------------------------------------------------------------------------------------------

PASSING = {"500": {"status": 500}, "429": {"status": 429}, "breaks off": {"break": True}, "slow": {"slow": 1.5}}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_heals_is_survived(service, fault):
    service.faults = [fault]
    assert score(scorer_of(service, timeout=1.0)) == [RATED] * 2


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_does_not_heal_costs_its_own_row(service, fault):
    service.faults = [{}, *[fault] * 3]
    rewards = score(scorer_of(service, timeout=1.0), 3)
    assert [reward.status for reward in rewards] == ["ok", "failed", "ok"]
    assert rewards[1].value is None and "the judge did not answer" in rewards[1].reason


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"null", b"[1]", b'{"model": "UnifiedReward", "choices": []}', b'{"choices": [null]}']
)
def test_an_answer_that_is_no_completion_is_a_failure(service, body):
    service.faults = [{"body": body}]
    rewards = score(scorer_of(service), 2)
    assert [reward.status for reward in rewards] == ["failed", "ok"] and "is no completion" in rewards[0].reason


def test_a_completion_without_words_is_a_failure(service):
    service.say = lambda asked: None
    assert "has no words in it" in score(scorer_of(service), 1)[0].reason


def test_a_server_that_dies_costs_what_it_did_not_judge(service):
    service.faults = [{}, {"die": True}]
    scorer = scorer_of(service)
    rewards = score_images(scorer, IMAGES, PROMPTS, [{}] * 6, label="test")
    assert [reward.status for reward in rewards] == ["ok"] + ["failed"] * 5
    assert "(up to 3 tries)" in rewards[1].reason and "(1 try)" in rewards[5].reason
    service.start()
    assert score_images(scorer, IMAGES, PROMPTS, [{}] * 6, label="test") == [RATED] * 6


# --- who answers -----------------------------------------------------------------------------------------------------


def test_its_identity_is_the_model_the_question_and_the_code(service):
    known = scorer_of(service).identity()
    assert known["served.id"] == "UnifiedReward" and known["served.root"] == "/models/UnifiedReward"
    assert scorer_of(service).identity() == known  # no time of a start in it
    assert scorer_of(service, judge="unified_reward").identity()["question"] != known["question"]
    service.root = "/models/UnifiedReward-2"
    assert scorer_of(service).identity()["served.root"] != known["served.root"]


def test_a_reply_from_another_model_stops_the_run(service):
    scorer = scorer_of(service)
    score(scorer, 1)
    service.model = "another"
    with pytest.raises(GateError, match="answers as model 'another', not as 'UnifiedReward'"):
        score_images(scorer, IMAGES, PROMPTS, [{}] * 6, label="test")


def test_another_model_under_the_same_name_stops_the_run_at_the_next_round(service):
    scorer = scorer_of(service)
    service.root = "/models/other"
    with pytest.raises(GateError, match=r"served.root from /models/UnifiedReward to /models/other"):
        score_images(scorer, IMAGES, PROMPTS, [{}] * 6, label="test")


def test_a_model_that_is_not_served_is_named_with_those_that_are(service):
    with pytest.raises(GranularError, match="serves no 'UnifiedRewart'; did you mean 'UnifiedReward'"):
        scorer_of(service, model="UnifiedRewart")


def test_a_server_that_is_down_at_the_start_is_one_sentence_and_worth_another_try(service):
    service.stop()
    with pytest.raises(GranularError, match=r"no judge answers at http://127.0.0.1:\d+/v1/models") as caught:
        scorer_of(service)
    assert passing(caught.value) and "\n" not in str(caught.value)


# --- the key ---------------------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_shows_up_nowhere(service, monkeypatch, caplog, capsys):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    scorer = scorer_of(service, api_key_env="JUDGE_KEY")
    service.faults = [{"status": 401, "says": f"{'x' * 270} Incorrect API key provided: {KEY}"}]
    service.say = lambda asked: f"{THREE}\nby the way, {KEY}"
    with caplog.at_level("DEBUG"):
        rewards = score(scorer, 2)
    assert service.headers[0]["authorization"] == f"Bearer {KEY}"
    assert rewards[0].status == "failed" and "HTTP 401" in rewards[0].reason and rewards[1].value == 3.0
    written = json.dumps([repr(rewards), repr(scorer.options), scorer.identity(), caplog.text, *capsys.readouterr()])
    assert "hunter2" not in written and "hunter2" not in caplog.text and "***" in rewards[1].reply


def test_a_key_in_the_environment_that_nobody_asked_for_is_not_sent(service, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    score(scorer_of(service), 1)
    assert KEY not in json.dumps(service.headers)


def test_a_key_that_is_not_there_is_one_sentence(service, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(GranularError, match="environment variable JUDGE_KEY is not set"):
        scorer_of(service, api_key_env="JUDGE_KEY")


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"judge": "template"}, "needs a template"),
        ({"pattern": "x"}, "belong to the judge template"),
        ({"low": 0.0}, "belong to the judge template"),
        ({"judge": "template", "template": "t", "pattern": "p", "low": 5.0}, "low must be less than high"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Options(url="http://h/v1", model="m", **options)


def test_a_template_that_is_not_there_is_one_sentence(service):
    with pytest.raises(GranularError, match=r"template: /nowhere.txt cannot be read"):
        scorer_of(service, template="/nowhere.txt")
