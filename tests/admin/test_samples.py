"""What the web admin and `danube top` make of metrics: rates, levels and series, in bounded memory."""

from __future__ import annotations

import sys
from array import array

from pydanube.admin.metrics_text import Numbers, SubscriptionCounts, TopicCounts, parse
from pydanube.admin.samples import Samples, sum_of
from pydanube.admin.series import MINUTES, SLOT_SECONDS, SLOTS
from pydanube.telemetry import Telemetry

START = 1_000_000.0
ORDERS = "/default/orders"
PLACE = (ORDERS, "billing")


def said(messages_in: float = 0.0, *, out: float = 0.0, lag: float = 0.0, topic: str = ORDERS) -> Numbers:
    return Numbers(
        {topic: TopicCounts(messages_in, messages_in * 100, 1.0)},
        {(topic, "billing"): SubscriptionCounts(messages_out=out, bytes_out=out * 100, lag=lag, consumers=1.0)},
        {"danube_broker_topics_owned": 1.0},
    )


NOBODY = Numbers({}, {}, {})


def hear(samples: Samples, at: float, **brokers: Numbers) -> None:
    for broker, numbers in brokers.items():
        samples.add(broker, numbers, at)
    samples.end_round(brokers, at)


def known(samples: Samples, name: str, topic: str = ORDERS) -> list[float]:
    return [value for _, value in samples.series(samples.topic(topic), name) if value is not None]


# --- reading the text ---------------------------------------------------------------------------------


def test_what_a_broker_prints_is_read() -> None:
    telemetry = Telemetry()
    telemetry.topic(ORDERS).messages_in.inc(7)
    telemetry.subscription(ORDERS, "billing").delivered.inc(5)
    telemetry.rpc("producer", "send_message").ok.inc(3)
    telemetry.rpc("producer", "send_message").errors.inc(1)
    numbers = parse(telemetry.snapshot().text().decode())
    assert numbers.topics[ORDERS].messages_in == 7
    assert numbers.subscriptions[PLACE].messages_out == 5
    assert numbers.broker["danube_broker_topics_owned"] == 1
    assert numbers.broker["danube_broker_rpc_total"] == 4
    assert numbers.broker["danube_broker_rpc_total:error"] == 1


def test_names_with_quotes_backslashes_and_braces_are_read_as_they_are() -> None:
    telemetry = Telemetry()
    name = '/default/a"b\\n} 1\n{x="y"'
    telemetry.topic(name).messages_in.inc(7)
    assert parse(telemetry.snapshot().text().decode()).topics == {name: TopicCounts(7.0, 0.0, 0.0)}


def test_labels_in_any_order_and_labels_we_do_not_know_are_no_trouble() -> None:
    line = (
        'danube_consumer_messages_out_total{broker="1",subscription="billing",topic="/default/orders"} 5 1700000000\n'
    )
    assert parse(line).subscriptions[PLACE].messages_out == 5


def test_a_line_that_is_none_is_passed_over() -> None:
    assert parse("<html>\n{\ndanube_x\ndanube_y nonsense\n") == NOBODY


# --- rates ----------------------------------------------------------------------------------------------


def test_a_rate_is_what_was_added_by_the_seconds_it_took() -> None:
    samples = Samples()
    hear(samples, START, a=said(1_000, out=500, lag=500))
    assert samples.topic(ORDERS).messages_in == 0.0  # one look is no rate
    hear(samples, START + 2, a=said(1_200, out=600, lag=600))
    topic = samples.topic(ORDERS)
    assert (topic.messages_in, topic.bytes_in, topic.messages_out) == (100.0, 10_000.0, 50.0)
    assert (topic.lag, topic.level("producers"), topic.level("consumers")) == (600, 1.0, 1.0)
    assert samples.subscription(*PLACE).messages_out == 50.0
    assert samples.broker("a").messages_in == 100.0
    assert (samples.cluster.messages_in, samples.cluster.lag) == (100.0, 600)


def test_the_lag_of_a_topic_is_that_of_the_subscription_furthest_behind() -> None:
    samples = Samples()
    both = Numbers(
        {ORDERS: TopicCounts()},
        {PLACE: SubscriptionCounts(lag=3.0), (ORDERS, "audit"): SubscriptionCounts(lag=9.0)},
        {},
    )
    hear(samples, START, a=both)
    assert samples.topic(ORDERS).lag == 9


def test_a_topic_whose_messages_wait_on_a_lost_disk_says_so() -> None:
    samples = Samples()
    line = 'danube_topic_messages_in_total{topic="/default/orders"} 5\n'
    hear(samples, START, a=parse(line + 'danube_topic_orphan_ranges{topic="/default/orders"} 2\n'))
    assert samples.topic(ORDERS).level("orphans") == 2
    hear(samples, START + 2, a=parse(line))
    assert samples.topic(ORDERS).level("orphans") == 0


def test_what_does_not_change_for_long_is_right_again_when_it_does() -> None:
    samples = Samples()
    for second in range(0, 20, 2):
        hear(samples, START + second, a=said(1_000, lag=7))
    assert (samples.topic(ORDERS).messages_in, samples.topic(ORDERS).lag) == (0.0, 7)
    hear(samples, START + 20, a=said(1_060, out=60, lag=3))
    topic = samples.topic(ORDERS)
    assert topic.messages_in > 0 and topic.messages_out > 0 and topic.lag == 3
    assert known(samples, "lag")[-1] == 3.0 and set(known(samples, "lag")[:-1]) == {7.0}


def test_a_topic_nobody_subscribed_to_has_no_lag() -> None:
    samples = Samples()
    hear(samples, START, a=Numbers({ORDERS: TopicCounts()}, {}, {}))
    assert samples.topic(ORDERS).lag is None


def test_a_counter_that_began_again_counts_from_nothing() -> None:
    samples = Samples()
    hear(samples, START, a=said(1_000))
    hear(samples, START + 2, a=said(10))
    assert samples.topic(ORDERS).messages_in == 5.0


def test_a_move_between_two_looks_neither_loses_nor_invents_messages() -> None:
    samples = Samples()
    hear(samples, START, a=said(1_000), b=NOBODY)
    hear(samples, START + 2, a=NOBODY, b=said(40))
    assert samples.topic(ORDERS).messages_in == 20.0


def test_a_broker_that_is_first_seen_now_is_no_burst() -> None:
    samples = Samples()
    hear(samples, START, a=NOBODY)
    hear(samples, START + 2, a=NOBODY, b=said(1_000_000))
    assert samples.topic(ORDERS).messages_in == 0.0
    assert samples.cluster.messages_in == 0.0


def test_a_clock_that_is_set_back_makes_no_negative_rate() -> None:
    samples = Samples()
    hear(samples, START, a=said(1_000))
    hear(samples, START - 100, a=said(1_100))
    hear(samples, START - 98, a=said(1_200))
    assert samples.topic(ORDERS).messages_in == 50.0


def test_of_a_silent_broker_nothing_is_known_after_a_while() -> None:
    samples = Samples()
    hear(samples, START, a=said(100, lag=5))
    hear(samples, START + 2, a=said(200, lag=5))
    for second in range(4, 20, 2):
        samples.failed("a", "nobody answers")
        samples.end_round(["a"], START + second)
    assert samples.failures == {"a": "nobody answers"}
    assert (samples.topic(ORDERS).messages_in, samples.topic(ORDERS).lag) == (0.0, None)


# --- series ---------------------------------------------------------------------------------------------


def test_a_series_has_one_value_per_slot_and_a_gap_where_nobody_looked() -> None:
    samples = Samples()
    for slot in (0, 1, 4):
        hear(samples, START + slot * SLOT_SECONDS, a=said(slot * 50, lag=slot))
    series = samples.series(samples.topic(ORDERS), "lag")
    assert len(series) == SLOTS
    assert series[-1][0] == START + 4 * SLOT_SECONDS
    assert [value for _, value in series[-6:]] == [None, 0.0, 1.0, None, None, 4.0]


def test_a_series_remembers_a_quarter_of_an_hour_and_no_more() -> None:
    samples = Samples()
    for slot in range(SLOTS + 50):
        hear(samples, START + slot * SLOT_SECONDS, a=said(slot * 50, lag=slot))
    lags = known(samples, "lag")
    assert SLOTS * SLOT_SECONDS >= 15 * 60
    assert lags == [float(lag) for lag in range(50, SLOTS + 50)]
    assert set(known(samples, "messages_in")[1:]) == {10.0}


def test_a_topic_keeps_its_past_when_it_moves_and_loses_it_when_it_is_gone() -> None:
    samples = Samples()
    hear(samples, START, a=said(lag=1), b=NOBODY)
    hear(samples, START + 5, a=NOBODY, b=NOBODY)
    hear(samples, START + 10, a=NOBODY, b=said(lag=3))
    assert known(samples, "lag") == [1.0, 1.0, 3.0]
    for second in range(15, 700, 5):
        hear(samples, START + second, a=NOBODY, b=NOBODY)
    assert samples.topics == {}
    assert samples.subscriptions == {}


def test_charts_reach_back_for_hours_with_a_mean_per_minute() -> None:
    samples = Samples()
    first = 1_000_020.0  # a full minute
    for number in range(60 * 12):  # an hour
        hear(samples, first + number * SLOT_SECONDS, a=said(number * 50.0, lag=float(number // 12)))
    topic = samples.topic(ORDERS)
    lags = samples.past(topic, "lag", 3600)
    assert [value for _, value in lags] == [float(minute) for minute in range(60)]
    assert [at for at, _ in lags] == [first + 60 * minute for minute in range(60)]
    rates = [value for _, value in samples.past(topic, "messages_in", 3600)]
    assert rates[-1] == 10.0 and rates[5] == 10.0
    everywhere = [value for _, value in samples.past(samples.cluster, "messages_in", 6 * 3600)]
    assert len(everywhere) == MINUTES and everywhere[-60:].count(10.0) >= 58 and everywhere[0] is None
    assert len(samples.past(topic, "lag", 300)) == 60 and samples.past(topic, "lag", 900)[-1][1] == 59.0


def test_a_sum_over_all_brokers_is_a_gap_while_one_is_silent_and_what_is_known_of_it_is_kept_apart() -> None:
    samples = Samples()
    other = "/default/other"

    def listen(slot: int, *, silent: bool = False, is_complete: bool = True) -> None:
        at = START + slot * SLOT_SECONDS
        samples.add("a", said(slot * 50.0), at)
        if silent:
            samples.failed("b", "nobody answers")
        else:
            samples.add("b", said(slot * 100.0, topic=other), at)
        samples.end_round(["a", "b"], at, is_complete=is_complete)

    for slot in range(4):
        listen(slot)
    for slot in range(4, 9):
        listen(slot, silent=True)
    for slot in range(9, 12):  # it has left, and its topics have no server yet
        samples.add("a", said(slot * 50.0), START + slot * SLOT_SECONDS)
        samples.end_round(["a"], START + slot * SLOT_SECONDS, is_complete=False)
    listen(12)
    listen(13)
    listen(14, silent=True)  # one look that came late
    listen(15)
    whole = [value for _, value in samples.past(samples.cluster, "messages_in", 75)]
    part = [value for _, value in samples.known_part(samples.cluster, "messages_in", 75)]
    assert whole[:3] == [30.0] * 3 and whole[3:11] == [None] * 8 and whole[12] == whole[14] == 30.0
    assert part == [*[None] * 3, *[10.0] * 8, *[None] * 4]  # nothing of what the silent one said last
    minutes = samples.known_part(samples.cluster, "messages_in", 3600)
    assert len(minutes) == 60


def test_a_sum_of_partitions_is_unknown_where_one_of_them_is() -> None:
    samples = Samples()
    for slot in range(8):
        at = START + slot * SLOT_SECONDS
        samples.add("a", said(slot * 50.0, topic="/default/x-part-0"), at)
        if slot not in (4, 5, 6):
            samples.add("b", said(slot * 100.0, topic="/default/x-part-1"), at)
        samples.end_round(["a", "b"], at)
    thing = sum_of([samples.topic(f"/default/x-part-{part}") for part in range(2)], lag=0.0)
    whole = [value for _, value in samples.past(thing, "messages_in", 35)]
    part = [value for _, value in samples.known_part(thing, "messages_in", 35)]
    assert whole == [30.0, 30.0, 30.0, None, None, None, 30.0]
    assert part == [None, None, None, 10.0, 10.0, 10.0, None]


def test_the_sum_of_several_things_has_their_past_together() -> None:
    samples = Samples()
    for number in range(30):
        both = Numbers(
            {f"/default/x-part-{part}": TopicCounts(number * 50.0, 0.0) for part in range(2)},
            {(f"/default/x-part-{part}", "s"): SubscriptionCounts(lag=5.0) for part in range(2)},
            {},
        )
        hear(samples, START + number * SLOT_SECONDS, a=both)
    thing = sum_of([samples.topic(f"/default/x-part-{part}") for part in range(2)], lag=10.0)
    assert thing.messages_in == 20.0 and thing.lag == 10
    for seconds in (300, 3600):
        series = samples.past(thing, "messages_in", seconds)
        assert series[-1][1] == 20.0 and series[0][1] is None


def test_a_thousand_idle_topics_take_no_slots_and_a_thousand_busy_ones_a_few_megabytes() -> None:
    def many(count: int, lag: float) -> Numbers:
        names = [f"/default/topic-{number}" for number in range(1_000)]
        return Numbers(
            {name: TopicCounts(count, count) for name in names},
            {(name, "s"): SubscriptionCounts(count, count, 0, lag) for name in names},
            {},
        )

    idle, busy = Samples(), Samples()
    for number in range(3):
        hear(idle, START + number * SLOT_SECONDS, a=many(0, 0))
        hear(busy, START + number * SLOT_SECONDS, a=many(number * 100, number))
    assert slots_bytes(idle) == 0
    assert 0 < slots_bytes(busy) < 8 * 1024 * 1024


def slots_bytes(samples: Samples) -> int:
    things = [samples.cluster, *samples.brokers.values(), *samples.topics.values(), *samples.subscriptions.values()]
    rings = [ring for thing in things for ring in (*thing.rings.values(), *thing.minutes.values())]
    arrays = [ring._values for ring in rings]
    return sum(sys.getsizeof(each) for each in arrays if isinstance(each, array))
