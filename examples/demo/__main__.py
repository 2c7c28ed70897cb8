"""Three brokers, a stream of orders, a topic that moves, a broker that is killed, and the proof that nothing is lost.

    make demo                        about two minutes
    make demo DEMO_ARGS=--keep       and the cluster stays until Ctrl-C, to look at
    scripts/demo --no-spark          without Spark

Exit code 0: nothing was lost. 1: something was, or something did not start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import pydanube
from examples.demo import processes
from examples.demo.load import Load, topic_names
from examples.demo.processes import Broker, DemoFailed, Store, admin
from examples.demo.screen import Screen

TAKEOVER_SECONDS = 60.0
RETURN_SECONDS = 90.0
SPARK_SECONDS = 240.0


@dataclass(slots=True)
class Result:
    """What is shown at the end."""

    sent: int = 0
    received: int = 0
    lost: int = 0
    duplicated: int = 0
    delivered_again: int = 0
    moves: int = 0
    move_pause_ms: list[int] = field(default_factory=list)
    crash_pause_ms: int = 0
    crash_topics: int = 0
    ttl_seconds: int = processes.TTL_SECONDS
    late: int = 0  # waited on the disk of the killed broker
    spark_messages: int | None = None
    spark_orders: int | None = None
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        spark_is_whole = self.spark_orders is None or self.spark_orders == self.sent
        return self.lost == 0 and self.duplicated == 0 and not self.errors and spark_is_whole


@asynccontextmanager
async def running_store(directory: Path, screen: Screen, wants_s3: bool) -> AsyncIterator[Store]:
    program = processes.weed() if wants_s3 else None
    if program is None:
        yield processes.store_in_directory(directory)
        return
    async with AsyncExitStack() as stack:
        with screen.step("start an S3-compatible store"):
            store = await stack.enter_async_context(processes.running_s3(directory, program))
        yield store


class Demo:
    def __init__(self, arguments: argparse.Namespace, screen: Screen, directory: Path) -> None:
        self.arguments = arguments
        self.screen = screen
        self.directory = directory
        self.result = Result()
        self.brokers: list[Broker] = []
        if arguments.pictures is not None:
            self.result.ttl_seconds = processes.OUTAGE_TTL_SECONDS

    async def run(self) -> Result:
        arguments, screen = self.arguments, self.screen
        began = time.monotonic()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(screen.shown())
            store = await stack.enter_async_context(running_store(self.directory, screen, arguments.s3))
            screen.fact("history", store.name)
            with screen.step("start three brokers, each with a member of the metadata store"):
                brokers = processes.running_brokers(self.directory, store, self.result.ttl_seconds)
                self.brokers = await stack.enter_async_context(brokers)
            urls = ",".join(broker.url for broker in self.brokers)
            screen.fact("brokers", urls)
            screen.fact("watch", f"danube top --endpoint {self.brokers[0].endpoint}")
            web = await stack.enter_async_context(processes.running_web(self.directory, self.brokers[0]))
            if web is not None:
                screen.fact("web admin", web)
            client = await stack.enter_async_context(pydanube.connect(urls, timeout=120))
            topics = topic_names(arguments.topics)
            with screen.step(f"create {len(topics)} topics"):
                for topic in topics:
                    await client.create_topic(topic)
            load = await stack.enter_async_context(Load(client, topics, arguments.rate))
            screen.numbers = lambda: self._numbers(load)
            with screen.step(f"send {arguments.rate} orders a second to {len(topics)} topics, and receive them"):
                await self._go_on(load, arguments.seconds)
            await self._move(load)
            if arguments.pictures is not None and web is not None:
                await self._take_pictures(web, arguments.pictures)
            await self._crash(client, load, web)
            await self._end(load)
            if arguments.spark:
                await self._count(await self._start_spark(stack, urls, topics, store))
            self._sum_up(load)
            self.result.seconds = time.monotonic() - began
            if arguments.keep:
                show(self.result, arguments, screen.console)
                await self._stay(web)
        return self.result

    def _numbers(self, load: Load) -> Mapping[str, str]:
        now = time.perf_counter()
        recent = sum(at > now - 2.0 for stream in load.streams for at, _, _ in stream.receipts[-1000:])
        return {
            "sent/s": f"{recent / 2:,.0f}",
            "sent": f"{load.sent:,}",
            "received": f"{load.received_count:,}",
            "on their way": f"{load.lost:,}",
            "stored twice": str(load.duplicated),
            "brokers up": f"{sum(broker.is_running for broker in self.brokers)} of {len(self.brokers)}",
        }

    async def _go_on(self, load: Load, seconds: float) -> None:
        """Until there were receipts for so long."""
        async with asyncio.timeout(60 + seconds):
            while any(stream.sent == 0 for stream in load.streams):
                load.check()
                await asyncio.sleep(0.1)
        await asyncio.sleep(seconds)
        load.check()

    async def _take_pictures(self, web: str, directory: Path) -> None:
        from examples.demo import pictures  # needs a browser

        with self.screen.step("give up some orders"):
            await pictures.give_up_orders(self.brokers)
        with self.screen.step(f"take pictures of {web}, once its charts have something to show"):
            await pictures.take(web, self.brokers, directory)

    # --- a move -----------------------------------------------------------------------------------------

    async def _move(self, load: Load) -> None:
        topic = load.orders.topic
        for number in range(self.arguments.moves):
            with self.screen.step(f"danube admin topics unload {topic} --wait") as step:
                began = time.perf_counter()
                words = ("topics", "unload", topic, "--wait", "--output", "json")
                answer = json.loads(await admin(self.brokers[number % len(self.brokers)], *words))
                await asyncio.sleep(1.5)
                pause = round(1000 * load.orders.pause_seconds(began, time.perf_counter() - 1.5))
                self.result.moves += 1
                self.result.move_pause_ms.append(pause)
                move = answer["results"][0]
                step.say(f"{self._name(move['from_broker'])} → {self._name(move['to_broker'])}, pause {pause} ms")
            load.check()

    def _name(self, broker_id: object) -> str:
        found = next((each for each in self.brokers if each.broker_id == str(broker_id)), None)
        return f"broker {found.number}" if found is not None else f"broker {broker_id}"

    # --- a crash ----------------------------------------------------------------------------------------

    async def _crash(self, client: pydanube.Client, load: Load, web: str | None) -> None:
        owners = {stream.topic: (await client.lookup(stream.topic)).stream_url for stream in load.streams}
        victim = next((each for each in self.brokers if each.url == owners[load.orders.topic]), self.brokers[0])
        hit = [stream for stream in load.streams if owners[stream.topic] == victim.url]
        self.result.crash_topics = len(hit)
        with self.screen.step(f"kill -9 broker {victim.number}, which has {len(hit)} of the topics") as step:
            killed_at = time.perf_counter()
            lease = f"the others find out after the TTL of {self.result.ttl_seconds} s"
            victim.kill()
            if self.arguments.pictures is not None and web is not None:
                from examples.demo import pictures  # needs a browser

                await pictures.take_outage(web, self.arguments.pictures)
            async with asyncio.timeout(TAKEOVER_SECONDS + self.result.ttl_seconds):
                while any(stream.last_receipt_at() < killed_at + 0.5 for stream in hit):
                    load.check()
                    step.say(f"{time.perf_counter() - killed_at:.1f} s, {lease}")
                    await asyncio.sleep(0.1)
            await asyncio.sleep(1.0)
            pause = max((stream.pause_seconds(killed_at, time.perf_counter()) for stream in hit), default=0.0)
            self.result.crash_pause_ms = round(1000 * pause)
            step.say(f"the others have them, longest pause {pause:.1f} s")
        await asyncio.sleep(self.arguments.seconds)
        self.result.late = sum(stream.missing_before(killed_at) for stream in hit)
        late = f": {self.result.late} messages are only on its disk" if self.result.late else ""
        with self.screen.step(f"start broker {victim.number} again{late}") as step:
            victim.start()
            await victim.ready()
            async with asyncio.timeout(RETURN_SECONDS):
                while sum(stream.missing_before(killed_at) for stream in hit):
                    load.check()
                    await asyncio.sleep(0.1)
            step.say("they are delivered" if self.result.late else "it had nothing that the others had not")

    # --- the end ----------------------------------------------------------------------------------------

    async def _end(self, load: Load) -> None:
        with self.screen.step("stop sending, receive the rest") as step:
            await load.stop()
            await load.received(RETURN_SECONDS)
            step.say(f"{load.lost} missing")

    def _sum_up(self, load: Load) -> None:
        result = self.result
        result.sent = load.sent
        result.received = len({(stream.topic, n) for stream in load.streams for n in stream.received.values()})
        result.lost = load.lost
        result.duplicated = load.duplicated
        result.delivered_again = load.again
        result.errors += load.errors[:5]

    async def _start_spark(
        self, stack: AsyncExitStack, urls: str, topics: list[str], store: Store
    ) -> asyncio.subprocess.Process:
        with self.screen.step("start Spark"):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "examples.demo.spark_count", urls, ",".join(topics)),
                json.dumps(dict(store.options)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=(self.directory / "spark.log").open("wb"),
                cwd=processes.ROOT,
                start_new_session=True,
            )
            stack.callback(_end_group, process.pid)
            await self._line_of(process, "started")
        return process

    async def _line_of(self, process: asyncio.subprocess.Process, event: str) -> dict[str, Any]:
        assert process.stdout is not None
        async with asyncio.timeout(SPARK_SECONDS):
            while line := await process.stdout.readline():
                with suppress(ValueError):
                    found = json.loads(line)
                    if isinstance(found, dict) and found.get("event") == event:
                        return found
        lines = (self.directory / "spark.log").read_text(errors="replace").strip().splitlines()
        raise DemoFailed(f"Spark ended before it had {event}: {(lines or ['it said nothing'])[-1]}")

    async def _count(self, process: asyncio.subprocess.Process) -> None:
        with self.screen.step("let Spark read all topics, from the first message to the last") as step:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            found = await self._line_of(process, "counted")
            self.result.spark_messages = sum(each["messages"] for each in found["topics"].values())
            self.result.spark_orders = sum(each["orders"] for each in found["topics"].values())
            step.say(f"{self.result.spark_messages:,} messages in {found['seconds']:.1f} s")

    async def _stay(self, web: str | None) -> None:
        self.screen.numbers = dict
        with self.screen.step("the cluster stays until Ctrl-C" + (f": {web}" if web else "")):
            await asyncio.Event().wait()


def _end_group(pid: int) -> None:
    """Spark's driver and its JVM."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


# --- what is shown at the end ---------------------------------------------------------------------------


def verdict(result: Result) -> Table:
    table = Table(show_header=False, title="Nothing is missing" if result.is_good else "SOMETHING IS WRONG")
    table.title_style = "bold green" if result.is_good else "bold red"

    def row(name: str, value: str, note: str = "", *, good: bool | None = None) -> None:
        style = "" if good is None else ("green" if good else "bold red")
        table.add_row(name, Text(value, style=style, justify="right"), Text(note, style="dim"))

    row("sent", f"{result.sent:,}", "with a receipt: on disk")
    row("received", f"{result.received:,}", "different orders")
    row("lost", f"{result.lost:,}", good=result.lost == 0)
    row("duplicated", f"{result.duplicated:,}", "stored under two offsets", good=result.duplicated == 0)
    row("delivered again", f"{result.delivered_again:,}", "same offset: its ack was not saved when the broker died")
    if result.move_pause_ms:
        pauses = ", ".join(f"{ms:,}" for ms in result.move_pause_ms)
        row("pause of a move", f"{pauses} ms", "longest time without a receipt while the topic moved")
    lease = f"of {result.crash_topics} topics; {result.ttl_seconds * 1000:,} ms is the TTL"
    row("pause of the crash", f"{result.crash_pause_ms:,} ms", lease)
    if result.late:
        row("came back", f"{result.late:,}", "were only on the killed broker's disk until it was started again")
    if result.spark_orders is not None:
        same = result.spark_orders == result.sent
        row("Spark counts", f"{result.spark_orders:,}", f"of {result.spark_messages:,} messages", good=same)
    row("time", f"{result.seconds:.0f} s")
    return table


async def run(arguments: argparse.Namespace, console: Console) -> int:
    directory = Path(tempfile.mkdtemp(prefix="danube-demo-"))
    demo = Demo(arguments, Screen(console), directory)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        result = await demo.run()
    except asyncio.CancelledError:
        if not demo.result.seconds:
            raise
        return 0 if demo.result.is_good else 1  # --keep: everything was shown
    except TimeoutError:
        what = demo.screen.last_step
        console.print(f"demo: it took too long to {what}; on a busy machine try --rate 100 --no-spark", style="red")
        return 1
    except (DemoFailed, pydanube.DanubeError) as error:
        console.print(f"demo: {error}", style="red", highlight=False, soft_wrap=True)
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    show(result, arguments, console)
    return 0 if result.is_good else 1


def show(result: Result, arguments: argparse.Namespace, console: Console) -> None:
    if arguments.output == "json":
        print(json.dumps({**asdict(result), "success": result.is_good}), flush=True)
        return
    console.print()
    console.print(verdict(result))
    for error in result.errors:
        console.print(f"error: {error}", style="red")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=int, default=500, help="orders a second, in all topics (500)")
    parser.add_argument("--topics", type=int, default=10, help="how many topics (10)")
    parser.add_argument("--moves", type=int, default=3, help="how often the topic orders moves (3)")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long the quiet parts are (5)")
    parser.add_argument("--no-spark", dest="spark", action="store_false", help="without Spark")
    parser.add_argument("--no-s3", dest="s3", action="store_false", help="history in a directory instead of S3")
    parser.add_argument("--keep", action="store_true", help="leave the cluster running until Ctrl-C")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="take pictures of the web admin, with Chromium")
    parser.add_argument("--output", choices=("table", "json"), default="table", help="json for scripts")
    arguments = parser.parse_args()
    console = Console(stderr=arguments.output == "json")
    try:
        sys.exit(asyncio.run(run(arguments, console)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; nothing is left behind")
        sys.exit(130)


if __name__ == "__main__":
    main()
