"""python -m meshwright.bench --suite foundation|smoke: speeds beside other tools on this machine, one table at the end."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from meshwright.bench.peers import PEERS
from meshwright.bench.runner import ORDER, SUITES, Settings, run
from meshwright.bench.workloads import WORKLOADS
from meshwright.errors import UserError

EPILOG = """examples:
  python -m meshwright.bench --suite foundation --out bench
  python -m meshwright.bench --suite foundation --workloads bert-large --gpus 1 --order peer,ours"""


def parse(argv: list[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(
        prog="python -m meshwright.bench",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", choices=SUITES, default="smoke")
    parser.add_argument("--workloads", help=f"a,b in place of the suite's; known: {', '.join(WORKLOADS)}")
    parser.add_argument("--peers", default="auto", help=f"auto: the fastest known ones; none; or of {', '.join(PEERS)}")
    parser.add_argument("--gpus", default="1,2", help="numbers of devices, on a CPU of ranks (default: 1,2)")
    parser.add_argument("--steps", type=int, help="of each engine (default: 30; smoke: 12)")
    parser.add_argument("--warm", type=int, help="steps that are not counted (default: 10; smoke: 4)")
    parser.add_argument("--order", default=",".join(ORDER), help="what runs, peer and ours in this order (%(default)s)")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds of one engine's run (default: %(default)g)")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no further engine is started")
    parser.add_argument("--out", type=Path, help="folder for results.json, results.md and log.txt")
    args = parser.parse_args(argv)
    steps, warm = (12, 4) if args.suite == "smoke" else (30, 10)
    try:
        gpus = tuple(int(part) for part in args.gpus.split(","))
    except ValueError:
        parser.error(f"--gpus {args.gpus}: numbers with commas, for example 1,2")
    return Settings(
        workloads=tuple(args.workloads.split(",")) if args.workloads else SUITES[args.suite],
        peers=args.peers,
        gpus=gpus,
        steps=args.steps if args.steps is not None else steps,
        warm=args.warm if args.warm is not None else warm,
        order=tuple(args.order.split(",")),
        out=args.out,
        timeout=args.timeout,
        budget=args.budget,
    )


def main() -> int:
    try:
        outcome = run(parse(), say=lambda text: print(text, flush=True))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print()
    print(outcome.table())
    return 0 if any(result.figures is not None for result in outcome.results) else 1


if __name__ == "__main__":
    sys.exit(main())
