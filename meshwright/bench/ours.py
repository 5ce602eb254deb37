"""Our own side of a measurement: a real run (loader, step, metrics) on random tokens. Started by `runner` on every rank.

python -m torch.distributed.run --nproc-per-node N -m meshwright.bench.ours WORKLOAD --folder DIR --steps S
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.bench.synthetic import FileRows, RandomRows
from meshwright.bench.workloads import WORKLOADS
from meshwright.config.load import Resolved
from meshwright.distributed import device as devices
from meshwright.distributed.environment import read_world
from meshwright.distributed.world import init_world
from meshwright.observe.metrics import read_metrics
from meshwright.observe.summary import load_facts
from meshwright.runtime.choose import bucket_mib, fill_layout, with_graphs
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.worker import Job, RunData, run_on
from meshwright.spec.counts import parameter_count
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, read_plan
from meshwright.train.objectives import make_objective


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--bucket", type=int, help="MiB of gradients reduced together; default: the rule of a plan")
    parser.add_argument("--plan", help="keys of a plan, a JSON file or text; default: data parallel, graphs by the rule")
    parser.add_argument("--tokens", help="a .npy file of tokens, or a prepared corpus, to read rows from; default: random rows")
    parser.add_argument("--rows", type=int, help="of the global batch; default: the workload's on every device")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--warmup", type=int, default=0, help="steps in which the learning rate rises")
    parser.add_argument("--seq", type=int, help="positions of a row; default: the workload's")
    parser.add_argument("--model", type=json.loads, default={}, help="JSON: fields of the model that are not the workload's")
    parser.add_argument("--until", type=float, help="loss whose first step and seconds are told (mean of 10 steps)")
    parser.add_argument("--profile")
    args = parser.parse_args()
    world, device_type = read_world(), devices.pick()
    workload = WORKLOADS[args.workload]
    seq_len = args.seq or workload.seq_len
    workload = replace(workload, model={**workload.model, **args.model}, seq_len=seq_len)
    config = workload.config(devices=world.world, steps=args.steps, folder=args.folder, precision=args.precision)
    changed: dict[str, Any] = {"batch": args.rows or config.train.batch, "lr": args.lr or config.train.lr}
    changed["schedule"] = config.train.schedule.model_copy(update={"warmup": args.warmup})
    config = config.model_copy(update={"train": config.train.model_copy(update=changed)})
    if args.dropout is not None:
        model = config.model.model_copy(update={"dropout": args.dropout, "attention_dropout": args.dropout})
        config = config.model_copy(update={"model": model})
    mode = {"auto": "off" if device_type == "cpu" else "inductor"}.get(args.compile, args.compile)
    task = make_objective(config.objective, 0).task
    bucket = args.bucket or bucket_mib(parameter_count(config.model, task), args.precision)
    plan = Plan(Layout(dp_replicate=world.world), workload.rows, args.precision, mode, bucket_mib=bucket)
    given = read_plan(args.plan) if args.plan else {}
    if given:
        plan = replace(plan, **{**given, "layout": fill_layout(given.get("layout", {}), world.world)})
    if "graphs" not in given:
        plan = with_graphs(plan, config, device_type, task, None)
    folder = RunFolder(args.folder)
    if world.rank == 0:
        folder.create(resume=False)
        folder.write_config(Resolved(config, {}))
        plan.save(folder.plan)
    assert config.model.vocab is not None
    rows: FileRows | RandomRows = RandomRows(workload.seq_len, config.model.vocab, workload.targets)
    if args.tokens:
        rows = FileRows(args.tokens, workload.seq_len, workload.targets, config.model.vocab)
    with init_world(world, device_type) as ranks:
        run_on(Job(folder, profile=args.profile), config, plan, RunData(rows, None, "random"), ranks)
        peak = devices.memory(ranks.device)
    if world.rank == 0:
        found = figures(folder.metrics, args.warm, config.train.batch, workload.seq_len, peak, args.until)
        usage = load_facts(folder.path)[1].get("usage", {})
        print(json.dumps({**found, "busy": usage.get("gpu_percent")}), flush=True)


def figures(
    metrics: Path, warm: int, rows: int, seq_len: int, peak: devices.Memory, until: float | None = None
) -> dict[str, object]:
    """Median step after `warm` steps, with the mean seconds of its parts. mean_gib: held between steps, on rank 0; on a CPU by
    the whole process, as is peak_gib.

    reached: first step, and seconds of training up to it, at which the mean of the last 10 losses is at most `until`.
    """
    records = read_metrics(metrics)
    steady = records[warm:]
    seconds = statistics.median(record["split"]["wall"] for record in steady)
    parts = {name: statistics.fmean(r["split"][name] for r in steady) for name in steady[0]["split"]}
    held = statistics.fmean(record["memory"].get("allocated", record["memory"]["rss"]) for record in steady)
    return {
        "engine": "meshwright",
        "seconds": seconds,
        "spread": (max(r["split"]["wall"] for r in steady) - min(r["split"]["wall"] for r in steady)) / seconds,
        "tokens_per_s": rows * seq_len / seconds,
        "samples_per_s": rows / seconds,
        "mfu": statistics.median(record["mfu"] for record in steady),
        "communication": parts["communication"] / parts["wall"],
        "parts": parts,
        "mean_gib": held / 2**30,
        "peak_gib": (peak.allocated_peak or max(record["memory"]["rss"] for record in records)) / 2**30,
        "reserved_gib": peak.reserved_peak / 2**30,
        "first_loss": records[0]["loss"],
        "loss": records[-1]["loss"],
        "reached": _reached(records, until),
    }


def _reached(records: list[dict[str, Any]], until: float | None) -> dict[str, float] | None:
    if until is None:
        return None
    for end in range(10, len(records) + 1):
        if statistics.fmean(record["loss"] for record in records[end - 10 : end]) <= until:
            return {"step": records[end - 1]["step"], "seconds": sum(record["split"]["wall"] for record in records[:end])}
    return None


if __name__ == "__main__":
    main()
