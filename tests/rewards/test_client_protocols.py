"""What is read of another project's server, and of its client."""

import pytest

from tests.rewards.samples import make_reward_request
from trimtab.rewards.client import PROTOCOLS, ProtocolError, encode, protocol_of
from trimtab.rewards.types import RewardFailed, RewardResult

OPENRLHF, PADDLENLP = PROTOCOLS["openrlhf"], PROTOCOLS["paddlenlp"]


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_a_request_and_a_reply_come_through_unchanged(protocol):
    request = make_reward_request(["你好", "", "b"], ["x", "", "z"], ["p", "q", ""])
    assert protocol.read_request(protocol.request_body(request)) == request
    assert protocol_of(protocol.request_body(request)) is protocol
    result = RewardResult([1.0, -2.5, 0.0])
    assert protocol.read_reply(protocol.reply_body(result), 3) == result


def test_openrlhfs_reply_may_have_scores_and_figures_of_any_kind():
    logs = {"each": [1, 2], "all": 0.5, "few": [1], "words": "no", "texts": ["a", "b"]}
    result = OPENRLHF.read_reply({"rewards": [1, 2], "scores": [0, 1], "extra_logs": logs}, 2)
    assert result == RewardResult([1.0, 2.0], [0.0, 1.0], {"each": [1.0, 2.0], "all": [0.5, 0.5]})
    assert OPENRLHF.read_reply({"rewards": [1, 2], "extra_logs": "none"}, 2) == RewardResult([1.0, 2.0])


def test_openrlhfs_request_needs_the_query_alone():
    request = OPENRLHF.read_request({"query": ["pa", "pb"], "prompts": ["p", "another"], "labels": None})
    assert request.responses == ["a", "pb"] and request.labels == [None, None]
    assert OPENRLHF.read_request({"query": ["pa"]}).responses == ["pa"]


def test_paddlenlps_labels_are_texts():
    body = PADDLENLP.request_body(make_reward_request(["a", "b", "c"], [None, 7, {"k": "é"}]))
    assert body["tgt"] == ["", "7", '{"k": "é"}']


def test_an_error_code_is_a_failure_and_a_strange_reply_is_not_understood():
    with pytest.raises(RewardFailed, match="error 3: no paper"):
        PADDLENLP.read_reply({"error_code": 3, "error_msg": "no paper", "score": [1.0]}, 1)
    for protocol in PROTOCOLS.values():
        with pytest.raises(ProtocolError, match="a reply with other in place of"):
            protocol.read_reply({"other": 1}, 1)
    with pytest.raises(ProtocolError, match="query or src"):
        protocol_of({"text": []})


def test_bodies_are_ascii():
    assert encode({"a": ["é"]}) == b'{"a": ["\\u00e9"]}'
