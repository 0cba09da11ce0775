"""Random programs over a layout against one device, for people: what was tried, and each failure made small.

python bench/fuzz.py --layout tp=2 --programs 2000 --seed 7
python bench/fuzz.py --layout all --seconds 600 --out /tmp/failures
python bench/fuzz.py --run tests/fuzz/kept/a_file.py
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "fuzz"))

from idioms import KINDS  # noqa: E402
from judge import FAILED, Tally, judge  # noqa: E402
from layouts import LAYOUTS, random_cases  # noqa: E402
from program import read  # noqa: E402
from shrink import shrink  # noqa: E402

from meshwright.workers.pool import LocalWorkers, local_workers  # noqa: E402

ALIKE = 3  # failures of one sort that are made small; the others are counted


def fuzz(layout: str, options: argparse.Namespace, workers: LocalWorkers) -> int:
    """The number of programs that failed."""
    tally, sorts, kinds = Tally(), Counter[str](), Counter[str]()
    judged = partial(judge, workers=workers, timeout=options.timeout)
    begin = time.monotonic()
    for number, case in enumerate(random_cases(layout, options.programs, options.seed)):
        case = replace(case, rows=(case.rows[0],) * options.steps) if options.steps else case
        case = replace(case, lengths=options.lengths)
        if time.monotonic() - begin > options.seconds:
            break
        if number < options.start or (options.kind and options.kind not in case.program.kinds):
            continue
        verdict = judged(case.run)
        tally.add(verdict)
        kinds.update(case.program.kinds)
        if verdict.kind in FAILED:
            sorts[verdict.sort] += 1
            print(f"\n=== {layout}, seed {options.seed}, program {number}: {verdict.kind}: {verdict.sort}", flush=True)
            if sorts[verdict.sort] <= ALIKE:
                case, verdict = shrink(case, verdict, judged, seconds=options.shrink)
                print(f"{case.run.printed()}\n--- {verdict.text}\n", flush=True)
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                name = f"{layout.replace(',', '-').replace('=', '')}_{options.seed}_{number}.py"
                said = "\n".join(f"# {line}" for line in f"{verdict.kind}: {verdict.sort}\n{verdict.text}".splitlines())
                (options.out / name).write_text(f"{said}\n{case.run.printed()}")
        if number % 100 == 99:
            print(f"{layout}: {number + 1} programs in {time.monotonic() - begin:.0f} s: {tally}", flush=True)
    print(
        f"\n{layout}, seed {options.seed}: {tally.kinds.total()} programs in {time.monotonic() - begin:.0f} s: {tally}"
    )
    for title, counted in (("failures", sorts), ("not judged", tally.reasons), ("made of", kinds)):
        print(f"  {title}: " + "; ".join(f"{n} × {what}" for what, n in counted.most_common(12)), flush=True)
    return sum(sorts.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="all", help=f"all, or one of {'; '.join(LAYOUTS)}")
    parser.add_argument("--programs", type=int, default=200, help="of each layout")
    parser.add_argument("--seconds", type=float, default=1e9, help="for each layout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, default=0, help="as many steps of equal rows: recorded programs run from the third on"
    )
    parser.add_argument(
        "--kind", choices=sorted(KINDS), metavar="KIND", help="only programs with something of this kind"
    )
    parser.add_argument("--lengths", type=int, default=1, help="batches have so many lengths in turn")
    parser.add_argument("--start", type=int, default=0, help="the number of the first program")
    parser.add_argument("--shrink", type=float, default=90.0, help="seconds for making a failure small")
    parser.add_argument("--timeout", type=float, default=40.0, help="seconds for a program")
    parser.add_argument("--out", type=Path, help="a folder for programs that fail")
    parser.add_argument("--run", type=Path, nargs="*", help="judge these files instead")
    options = parser.parse_args()
    with local_workers(8, start_method="spawn") as workers:  # as under torchrun: each hashes strings in its own way
        if options.run:
            verdicts = [(path, judge(read(path.read_text()), workers, timeout=options.timeout)) for path in options.run]
            for path, verdict in verdicts:
                print(f"{path.name}: {verdict.kind} {verdict.sort}\n{verdict.text}".rstrip())
            return sum(verdict.failed for _, verdict in verdicts)
        layouts = list(LAYOUTS) if options.layout == "all" else [options.layout]
        return min(sum(fuzz(layout, options, workers) for layout in layouts), 1)


if __name__ == "__main__":
    sys.exit(main())
