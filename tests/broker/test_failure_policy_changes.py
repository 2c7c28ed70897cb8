"""A failure policy changes in what is given, and in nothing else."""

from __future__ import annotations

import asyncio

from grpc import StatusCode

from pydanube.wire._pb.danube import DanubeAdmin_pb2 as admin_pb
from pydanube.wire._pb.pydanube import admin_pb2 as pb
from tests.harness.servers import TOPIC, Calls, refused, served

BOTH = {"topic": TOPIC, "subscription": "s"}


@served()
async def test_only_what_is_given_changes_and_the_answer_says_what(calls: Calls) -> None:
    await calls.create_topic(TOPIC)
    first = pb.ChangeFailurePolicyRequest(
        poison_policy="DeadLetter", dead_letter_topic="/default/dead", max_redelivery_count=2, **BOTH
    )
    said = (await calls.ours.ChangeFailurePolicy(first)).changes
    assert {each.name: (each.before, each.after) for each in said} == {
        "max_redelivery_count": ("5", "2"),
        "dead_letter_topic": ("", "/default/dead"),
        "poison_policy": ("Block", "DeadLetter"),
    }
    said = (await calls.ours.ChangeFailurePolicy(pb.ChangeFailurePolicyRequest(ack_timeout_ms=5000, **BOTH))).changes
    assert [(each.name, each.before, each.after) for each in said] == [("ack_timeout_ms", "30000", "5000")]
    question = admin_pb.GetSubscriptionFailurePolicyRequest(**BOTH)
    policy = (await calls.topics.GetSubscriptionFailurePolicy(question)).failure_policy
    assert (policy.poison_policy, policy.dead_letter_topic) == (admin_pb.DeadLetter, "/default/dead")
    assert (policy.max_redelivery_count, policy.ack_timeout_ms) == (2, 5000)


@served()
async def test_two_changes_at_once_both_count(calls: Calls) -> None:
    await calls.create_topic(TOPIC)
    await asyncio.gather(
        calls.ours.ChangeFailurePolicy(pb.ChangeFailurePolicyRequest(ack_timeout_ms=5000, **BOTH)),
        calls.ours.ChangeFailurePolicy(pb.ChangeFailurePolicyRequest(max_redelivery_count=0, **BOTH)),
    )
    question = admin_pb.GetSubscriptionFailurePolicyRequest(**BOTH)
    policy = (await calls.topics.GetSubscriptionFailurePolicy(question)).failure_policy
    assert (policy.max_redelivery_count, policy.ack_timeout_ms) == (0, 5000)


@served()
async def test_a_change_that_makes_no_policy_is_refused_and_changes_nothing(calls: Calls) -> None:
    await calls.create_topic(TOPIC)
    for request, word in (
        (pb.ChangeFailurePolicyRequest(**BOTH), "say what to change"),
        (pb.ChangeFailurePolicyRequest(poison_policy="DeadLetter", **BOTH), "needs a topic"),
        (pb.ChangeFailurePolicyRequest(poison_policy="Explode", **BOTH), "DeadLetter, Block, Drop"),
        (pb.ChangeFailurePolicyRequest(base_redelivery_delay_ms=70_000, **BOTH), "at most max_redelivery_delay_ms"),
        (pb.ChangeFailurePolicyRequest(dead_letter_topic=TOPIC, **BOTH), "for ever"),
    ):
        code, sentence = await refused(calls.ours.ChangeFailurePolicy(request))
        assert code is StatusCode.INVALID_ARGUMENT and word in sentence
    found = await calls.topics.GetSubscriptionFailurePolicy(admin_pb.GetSubscriptionFailurePolicyRequest(**BOTH))
    assert not found.HasField("failure_policy")


@served()
async def test_a_dead_letter_topic_is_taken_away_with_an_empty_name(calls: Calls) -> None:
    await calls.create_topic(TOPIC)
    await calls.ours.ChangeFailurePolicy(pb.ChangeFailurePolicyRequest(dead_letter_topic="/default/dead", **BOTH))
    said = (await calls.ours.ChangeFailurePolicy(pb.ChangeFailurePolicyRequest(dead_letter_topic="", **BOTH))).changes
    assert [(each.before, each.after) for each in said] == [("/default/dead", "")]
