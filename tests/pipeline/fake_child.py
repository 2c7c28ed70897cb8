"""What a supervisor's tests start instead of Spark: it does what its settings say, at once."""

import json
import os
import signal
import sys
import time


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    order = json.loads(sys.stdin.readline())
    what = order["settings"]["do"]
    if (place := order["settings"].get("alone")) is not None:
        os.close(os.open(place, os.O_CREAT | os.O_EXCL))  # fails if another run of the pipeline is there
    if what == "environment":
        say(error=" ".join(sorted(name for name in os.environ if name.startswith("TEST_"))))
        return
    if what == "ignores":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if what == "leaves a child":
        if os.fork() == 0:
            time.sleep(60)
        say(report={"job": "x", "result": "ok", "problems": []})
        return
    say(
        progress="going", fresh_us=int(time.time() * 1e6), messages=3, behind_messages=1, quarantined=2, pid=os.getpid()
    )
    print("a line that is none of ours")
    if what in ("hangs", "ignores"):
        time.sleep(60)
    elif what == "good":
        say(report={"job": "x", "result": "ok", "problems": [], "messages": 5, "quarantined": 2})
    elif what == "wrong":
        say(report={"job": "x", "result": "failed", "problems": ["offset 7 is missing", "so is 8"]})
        sys.exit(1)
    elif what == "lies":
        say(report={"job": "x", "result": "ok", "problems": []})
        sys.exit(1)
    elif what == "refused":
        say(error="token = {'from_env': 'T'} is not allowed: set and not empty", refused=True)
        sys.exit(2)
    elif what == "crashes":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "silent":
        sys.exit(0)
    if place is not None:
        os.unlink(place)


main()
