"""Run a campaign: `python -m tests.faults.campaign [--seed N] [--share 0.1]`. Ends with 1 if what must not happen did."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.campaign import lives, processes
from tests.faults.campaign.checks import CHECKS, switch_off
from tests.faults.campaign.tally import WANTED, Tally

LIVES = 420  # of four directories each
KILLS = WANTED["daemon kill"]
DEATHS = 220
HANG_S = 1800.0  # a whole campaign that takes longer hangs, and ends with every thread's stack


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--share", type=float, default=1.0, help="of a whole campaign")
    parser.add_argument("--without", choices=sorted(CHECKS), default="", help="a check to switch off: must go red")
    options = parser.parse_args()
    share, seed = options.share, options.seed
    print(f"replay with --seed {seed} --share {share:g}" + (f" --without '{options.without}'" * bool(options.without)))
    logging.disable(logging.CRITICAL)
    faulthandler.dump_traceback_later(HANG_S * share + 120.0, exit=True)
    switch_off(options.without)
    tally = Tally()
    rng = random.Random(seed)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="forebay-") as name:
        folder = Path(name)
        (folder / "lives").mkdir()
        (folder / "daemon").mkdir()
        lives.run(rng.randrange(1 << 32), max(2, round(LIVES * share)), folder / "lives", tally)
        lives_s = time.monotonic() - started_s
        kills, deaths = max(4, round(KILLS * share)), max(4, round(DEATHS * share))
        processes.run(rng.randrange(1 << 32), kills, deaths, folder / "daemon", tally, without=options.without)
    print(tally.table())
    print(f"{lives_s:.0f} s in this process, {time.monotonic() - started_s - lives_s:.0f} s with daemons")
    short = tally.shortfalls(share)
    print("\n".join(["", *short] if short else ["", "all demands are met"] if not tally.violations else []))
    return 1 if short or tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
