"""Scorers over HTTP: lossless there and back, and no fault of a service ever becomes a number."""

from __future__ import annotations

import json
import re
import threading

import numpy as np
import pytest

from stages.core.errors import GateError, GranularError, passing
from stages.core.types import Reward
from stages.reward import transport, wire
from stages.reward.remote import Options, RemoteScorer, load
from stages.reward.scoring import score_images
from tests.reward.fake_services import IDENTITY, ScorerService

RNG = np.random.default_rng(0)
IMAGES = RNG.random((10, 4, 5, 3), dtype=np.float32)
PROMPTS = [f"prompt {row}" for row in range(10)]
METADATA = [{"row": row} for row in range(10)]
MEANS = [Reward(float(image.mean()), "ok", "mean", (("first", float(image[0, 0, 0])),)) for image in IMAGES]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(transport, "FIRST_WAIT", 0.01)


@pytest.fixture
def service():
    one = ScorerService()
    one.start()
    yield one
    one.stop()


def scorer_of(service: ScorerService, **changes) -> RemoteScorer:
    options = {"timeout": 5.0, "retries": 2, "concurrency": 1, "chunk": 4, **changes}
    return load(None, 64, "cpu", Options(url=f"http://127.0.0.1:{service.port}", **options))


def score(scorer, rows=slice(None)):
    return scorer.score(images=IMAGES[rows], prompts=PROMPTS[rows], metadata=METADATA[rows])


# --- what travels --------------------------------------------------------------------------------------------------


def test_images_travel_bit_for_bit():
    images = np.nextafter(IMAGES, np.float32(0))
    asked = wire.decode_request(wire.encode_request(images=images, prompts=PROMPTS, metadata=METADATA))
    np.testing.assert_array_equal(asked.images.view(np.uint32), images.view(np.uint32))
    assert (asked.prompts, asked.metadata) == (PROMPTS, METADATA)


def test_rewards_travel_bit_for_bit():
    sent = [
        Reward(0.1 + 0.2, "ok", "why", (("a", 1 / 3),), "words"),
        Reward.failed("broken", "words that say nothing"),
        Reward(None, "missing", "not asked"),
    ]
    body = json.dumps(wire.encode_reply(wire.Reply(IDENTITY, sent, [True, False, False]))).encode()
    assert wire.decode_reply(body, 3) == wire.Reply(IDENTITY, sent, [True, False, False])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": "%%%"}, "'images' cannot be used"),
        ({"images": 3}, "'images' cannot be used"),
        ({"prompts": ["a"]}, "10 images with 1 prompts"),
        ({"prompts": "a"}, "'prompts' is no list"),
        ({"metadata": [1]}, "'metadata' is no list"),
        ({"extra": 1}, "exactly 'images', 'prompts' and 'metadata'"),
    ],
)
def test_a_request_that_is_none_is_refused(change, message):
    value = json.loads(wire.encode_request(images=IMAGES, prompts=PROMPTS, metadata=METADATA)) | change
    with pytest.raises(wire.Unreadable, match=message):
        wire.decode_request(json.dumps(value).encode())


def test_a_pickle_is_not_opened():
    import base64
    import io

    packed = io.BytesIO()
    np.savez(packed, images=np.array([{"a": 1}], object))
    value = {"images": base64.b64encode(packed.getvalue()).decode(), "prompts": [], "metadata": []}
    with pytest.raises(wire.Unreadable, match="allow_pickle=False"):
        wire.decode_request(json.dumps(value).encode())


# --- a service that is well ------------------------------------------------------------------------------------------


def test_rewards_come_back_in_the_order_of_the_images_whichever_is_answered_first(service):
    answer, answered = service.post, [threading.Event() for _ in range(4)]
    answered[3].set()

    def last_first(body):
        chunk = wire.decode_request(body).metadata[0]["row"] // 4
        answered[chunk + 1].wait(30)
        reply = answer(body)
        answered[chunk].set()
        return reply

    service.post = last_first
    assert score(scorer_of(service, concurrency=3, timeout=60.0)) == MEANS
    assert [asked.metadata[0]["row"] for asked in service.asked] == [8, 4, 0]


def test_no_more_requests_are_under_way_than_allowed(service):
    under_way, most = [0], [0]
    lock = threading.Lock()
    score_one = service.post

    def counted(body):
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        reply = score_one(body)
        threading.Event().wait(0.05)
        with lock:
            under_way[0] -= 1
        return reply

    service.post = counted
    assert score(scorer_of(service, chunk=1, concurrency=3)) == MEANS
    assert most[0] == 3


def test_arguments_cannot_be_confused(service):
    with pytest.raises(TypeError, match="positional"):
        scorer_of(service).score(IMAGES, PROMPTS, METADATA)


def test_its_identity_is_the_service_s(service):
    scorer = scorer_of(service)
    known = scorer.identity()
    assert known["kind"] == "http" and known["served.weights"] == "w1" and "url" not in known
    score(scorer)
    assert scorer.identity() == known
    service.identity["weights"] = "w2"
    assert scorer_of(service).identity() != known


def test_prompts_that_are_cut_are_known_with_their_images(service):
    scorer = scorer_of(service)
    long = "a prompt that is longer than what it reads"
    scorer.score(images=IMAGES[:2], prompts=[long, "short"], metadata=[{}, {}])
    assert scorer.truncated([long, "short", "never seen"]) == [True, False, False]


# --- faults ----------------------------------------------------------------------------------------------------------

PASSING = {
    "500": {"status": 500},
    "429": {"status": 429},
    "breaks off": {"break": True},
    "slow": {"slow": 1.5},
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_heals_is_survived(service, fault):
    service.faults = [fault]
    assert score(scorer_of(service, timeout=1.0)) == MEANS


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"status": 500, "says": "CUDA out of memory"}, "HTTP 500 .*CUDA out of memory.*up to 3 tries"),
        ({"break": True}, "RemoteProtocolError|ReadError"),
        ({"slow": 1.5}, "no answer in time"),
    ],
)
def test_what_does_not_heal_is_a_failure_with_a_reason_and_costs_its_own_rows(service, fault, reason):
    service.faults = [{}, *[fault] * 3]
    rewards = score(scorer_of(service, timeout=1.0))
    assert rewards[:4] == MEANS[:4] and rewards[8:] == MEANS[8:]
    for reward in rewards[4:8]:
        assert reward.status == "failed" and reward.value is None
        assert re.search(reason, reward.reason)


def test_what_cannot_heal_is_not_tried_again(service):
    service.faults = [{"status": 400, "says": "not like this"}]
    rewards = score(scorer_of(service), slice(0, 4))
    assert [reward.status for reward in rewards] == ["failed"] * 4 and "HTTP 400" in rewards[0].reason
    assert len(service.headers) == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "the body is empty"),
        (b"<html>Service Unavailable</html>", "not JSON: '<html>"),
        (b"[1, 2, 3, 4]", "expected a JSON object"),
        (b"null", "expected a JSON object"),
        (b'{"rewards": [0.5, 0.5, 0.5, 0.5]}', "'identity' is no object"),
    ],
)
def test_a_reply_that_is_none_is_a_failure(service, body, reason):
    service.faults = [{"body": body}]
    rewards = score(scorer_of(service))
    assert all(reward.status == "failed" and reason in reward.reason for reward in rewards[:4])
    assert rewards[4:] == MEANS[4:]


@pytest.mark.parametrize(("cut", "count"), [(-1, 3), (1, 5)])
def test_a_list_that_is_too_short_or_too_long_belongs_to_nobody(service, cut, count):
    service.spoil = lambda reply: {
        **reply, "rewards": reply["rewards"][:cut] if cut < 0 else [*reply["rewards"], reply["rewards"][0]]
    }  # fmt: skip
    rewards = score(scorer_of(service), slice(0, 4))
    assert {reward.reason for reward in rewards} == {
        f"the service's reply cannot be used: {count} rewards for 4 images"
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "0.5", None, True, [0.5], {}, 10**400])
def test_a_row_that_is_no_number_is_a_failure_and_its_neighbours_are_not(service, value):
    def spoil(reply):
        reply["rewards"][2]["value"] = value
        return reply

    service.spoil = spoil
    rewards = score(scorer_of(service), slice(0, 4))
    assert [reward.status for reward in rewards] == ["ok", "ok", "failed", "ok"]
    assert "not a finite number" in rewards[2].reason and rewards[2].value is None


@pytest.mark.parametrize("row", [0.5, None, {"value": 0.5, "status": "fine"}, {"value": 0.5, "parts": {"a": "b"}}])
def test_a_row_of_another_form_is_a_failure(service, row):
    service.spoil = lambda reply: {**reply, "rewards": [row, *reply["rewards"][1:]]}
    assert [reward.status for reward in score(scorer_of(service), slice(0, 4))] == ["failed", "ok", "ok", "ok"]


def test_a_failure_of_the_service_s_own_keeps_its_reason_and_no_value(service):
    failed = {"value": 0.0, "status": "failed", "reason": "black image", "parts": {}, "reply": "?"}
    service.spoil = lambda reply: {**reply, "rewards": [failed]}
    assert score(scorer_of(service), slice(0, 1)) == [Reward(None, "failed", "black image", reply="?")]


def test_a_service_that_dies_costs_what_it_did_not_score_and_is_not_courted(service):
    service.faults = [{}, {"die": True}]
    scorer = scorer_of(service, chunk=2)
    rewards = score_images(scorer, IMAGES, PROMPTS, METADATA, label="test")
    assert rewards[:2] == MEANS[:2]
    assert all(reward.status == "failed" for reward in rewards[2:])
    assert "up to 3 tries" in rewards[2].reason and "1 try" in rewards[-1].reason
    service.start()
    assert score(scorer) == MEANS


# --- another scorer, or none ----------------------------------------------------------------------------------------


def test_another_scorer_behind_the_same_address_stops_the_run(service):
    scorer = scorer_of(service)
    score(scorer)
    service.identity["weights"] = "w2"
    with pytest.raises(GateError, match=r"another scorer answers at .* than at the start: served.weights changed"):
        score_images(scorer, IMAGES, PROMPTS, METADATA, label="test")


def test_a_service_that_is_down_at_the_start_is_one_sentence_and_worth_another_try(service):
    service.stop()
    with pytest.raises(GranularError, match=r"no scorer answers at http://127.0.0.1:\d+ \(.*start it with") as caught:
        scorer_of(service)
    assert passing(caught.value) and "\n" not in str(caught.value)


def test_something_else_at_the_address_is_one_sentence(service):
    service.get = lambda path: ["hello"]
    with pytest.raises(GranularError, match=r"what answers at .* is no scorer"):
        scorer_of(service)
    service.get = lambda path: {"identity": {}}
    with pytest.raises(GranularError, match="'identity' is no object of texts"):
        scorer_of(service)


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x", "http://", "http://host:99999"])
def test_an_address_is_an_address(url):
    with pytest.raises(ValueError, match=r"expected http://HOST:PORT or https://HOST"):
        Options(url=url)


@pytest.mark.parametrize("url", ["http://user:hunter2@host", "http://h/?key=hunter2", "https://h/#hunter2"])
def test_a_secret_in_an_address_is_refused_and_not_repeated(url):
    with pytest.raises(GranularError, match="secrets belong in the environment") as caught:
        Options(url=url)
    assert "hunter2" not in str(caught.value)
