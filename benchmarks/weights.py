"""Weights from a trainer to makers: time, bytes and memory, against other ways.

One state of `--megabytes` in 180 bfloat16 tensors, over loopback. Rounds of all ways alternate; the
figures are medians, ratios are of calls that ran one right after the other.

`full_fetch_over_tcp`: speed of `poll(in_place=True)` of a full version, over that of a plain copy
of the same bytes into the same tensors: `sendall` in one process, `recv_into` in another.
`full_publish_over_tcp`: the same of `publish` with deltas=False, to a server with the allocator's
settings of embedded://. `fetch_over_best_single_key`: time of the fastest way to load a state
dict from one key (pickle, torch.save or safetensors), over that of `poll(in_place=True)`; both from
a server without those settings.

`delta_percent`: bytes of a delta after one AdamW step at a learning rate, as a percentage of the
full version: a transformer of 23M float32 parameters, trained here, published as bfloat16.
`delta_over_xor_zstd`: the same bytes at 1e-6, over those of XOR with zstd level 1. `encode_gb_s`
and `apply_gb_s`: one thread, 4 MiB blocks, the trained states repeated up to `--megabytes`.

`host_cache_8_over_1`: seconds until a full version is loaded by 8 processes that share the host's
copy, over those of one of them alone; none of them reads the weights before all have loaded.
`peak_extra_memory`: the largest growth of a process in a `poll(in_place=True)`, over the bytes of
its model. `wake_p99_ms`: from just before `publish` of a tiny state is called to the return of
`wait` in 8 processes; 99th percentile of all versions and readers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import redis
import torch
from torch import nn

import redrb
from benchmarks import weights_peers as peers
from benchmarks.processes import Worker
from benchmarks.server import private_server
from benchmarks.weights_delta import RATES, measure_codec, measure_sizes
from benchmarks.weights_processes import readers, tcp_copy
from benchmarks.weights_state import (
    Changing,
    Training,
    content_of,
    large_model,
    memories,
    state_bytes,
)
from redrb.connection.embedded import ALLOCATOR

READERS = 8
RARELY = 4
"""Calls without a bound are timed every so many rounds."""

COPY, PUBLISH, FETCH = "TCP copy", "publish", "fetch in place"
ORDINARY = ", ordinary server"
PAUSE_S = 0.02  # between two publishes, so that all readers wait again
WARM_UP = 3

Seconds = dict[str, list[float]]


def transport(tuned: str, plain: str, options: argparse.Namespace) -> tuple[Seconds, int]:
    """Time full versions and a copy over TCP; returns seconds, and bytes of the state."""
    source = Changing(large_model(options.megabytes))
    model = large_model(options.megabytes)
    seconds: Seconds = {}
    with ExitStack() as scope:
        copy = scope.enter_context(tcp_copy(options.megabytes))
        client = scope.enter_context(redrb.connect(tuned))
        other = scope.enter_context(redrb.connect(plain))
        publisher = redrb.WeightPublisher(client, "full", deltas=False)
        untuned = redrb.WeightPublisher(other, "full", deltas=False)
        anchors = redrb.WeightPublisher(client, "anchor", anchor_every=1)
        live = redrb.WeightSubscriber(client, "full")
        staged = redrb.WeightSubscriber(client, "full")
        ordinary = redrb.WeightSubscriber(other, "full")
        often: dict[str, Callable[[], object]] = {
            COPY: lambda: copy.into(memories(model)),
            PUBLISH: lambda: publisher.publish(source.model),
            "": lambda: copy.into(memories(model)),
            FETCH: lambda: live.poll(model, in_place=True),
        }
        rarely: dict[str, Callable[[], object]] = {
            "publish, deltas=True, in full": lambda: anchors.publish(source.model),
            "fetch, staged": lambda: staged.poll(model),
            "publish" + ORDINARY: lambda: untuned.publish(source.model),
            FETCH + ORDINARY: lambda: ordinary.poll(model, in_place=True),
        }
        for number in range(-WARM_UP, options.rounds):
            calls = often if number > 0 and number % RARELY else often | rarely
            source.next()
            for name, call in calls.items():
                spent = timed(call)
                if number >= 0:
                    seconds.setdefault(name or COPY, []).append(spent)
            if not _same(source.model, model):
                raise SystemExit("the fetched weights differ from the published ones")
        time_peers(plain, source.model, model, seconds, options.peer_rounds)
    return seconds, state_bytes(model)


def time_peers(
    url: str, source: nn.Module, model: nn.Module, seconds: Seconds, rounds: int
) -> None:
    with redis.Redis.from_url(url) as client:
        for number in range(rounds):
            for name in peers.FORMATS:
                if not number:
                    sent = timed(partial(peers.publish, client, name, source))
                    seconds[f"publish, {name}{ORDINARY}"] = [sent]
                got = timed(partial(peers.fetch, client, name, model))
                seconds.setdefault(f"fetch, {name}{ORDINARY}", []).append(got)


def host_cache(
    client: redrb.Client, source: Changing, workers: Sequence[Worker], rounds: int
) -> Seconds:
    """Time until one process, and until all, have a new full version, with and without."""
    seconds: Seconds = {}
    # a name for each: a process that does not take part would keep its version from being replaced
    publishers = [
        (redrb.WeightPublisher(client, name, deltas=False), name, asked)
        for name, asked in (("shared", workers), ("alone", workers[:1]))
    ]
    # without the cache first: with it, parameters are in memory that is not to be written to
    for cached, begin, end in ((False, -1, 2), (True, -WARM_UP, rounds)):
        for number in range(begin, end):
            for publisher, name, asked in publishers:
                publisher.publish(source.next())
                for worker in asked:
                    worker.ask("load", name, cached, len(asked) > 1)
                results = [worker.result() for worker in asked]
                if {content for *_, content in results} != {content_of(source.model)}:
                    raise SystemExit("the loaded weights differ from the published ones")
                if number < 0:
                    continue
                began = min(began for began, *_ in results)
                title = f"{len(asked)} {'host cache' if cached else 'each from Redis'}"
                seconds.setdefault(title, []).append(max(at for _, at, *_ in results) - began)
                title += ", and read"
                seconds.setdefault(title, []).append(max(at for *_, at, _ in results) - began)
    return seconds


def wakes(client: redrb.Client, workers: Sequence[Worker], publishes: int) -> list[float]:
    """Return milliseconds from each call of `publish` to each reader's return from `wait`."""
    publisher = redrb.WeightPublisher(client, "tiny", deltas=False)
    first = publisher.publish({"tiny": torch.zeros(8)}).version
    for worker in workers:
        worker.ask("watch", "tiny", first, first + publishes)
    began: dict[int, float] = {}
    for number in range(1, publishes + 1):
        time.sleep(PAUSE_S)
        state = {"tiny": torch.full((8,), float(number))}
        began[first + number] = time.monotonic()
        publisher.publish(state)
    spent: list[float] = []
    for worker in workers:
        seen = worker.result()
        for version, since in began.items():
            spent.append(1e3 * next(at for found, at in seen if found >= version) - 1e3 * since)
    return spent


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


def _print_seconds(seconds: Seconds, nbytes: int) -> dict[str, float]:
    medians = {name: statistics.median(spent) for name, spent in seconds.items()}
    for name, spent in seconds.items():
        print(
            f"  {name:38} {medians[name]:7.3f} s  (best {min(spent):.3f})"
            f"  {nbytes / medians[name] / 1e9:6.2f} GB/s",
            flush=True,
        )
    return medians


def _transport(tuned: str, plain: str, options: argparse.Namespace) -> dict[str, object]:
    seconds, nbytes = transport(tuned, plain, options)
    print(f"{nbytes / 1e6:.0f} MB, medians of {options.rounds} rounds:")
    medians = _print_seconds(seconds, nbytes)
    copies = seconds[COPY]
    best = min(medians[f"fetch, {name}{ORDINARY}"] for name in peers.FORMATS)
    return {
        "full_fetch_over_tcp": round(_ratio(copies[1::2], seconds[FETCH]), 3),
        "full_publish_over_tcp": round(_ratio(copies[::2], seconds[PUBLISH]), 3),
        "fetch_over_best_single_key": round(best / medians[FETCH + ORDINARY], 2),
    }


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of calls that ran one right after the other."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _deltas(url: str, options: argparse.Namespace) -> dict[str, object]:
    training = Training()
    started = time.perf_counter()
    torch.set_num_threads(options.threads)
    losses = training.run(options.steps)
    print(
        f"trained {options.steps} steps in {time.perf_counter() - started:.0f} s: loss "
        f"{losses[0]:.2f} to {statistics.mean(losses[-10:]):.2f}"
    )
    with redrb.connect(url) as client:
        sizes = measure_sizes(client, training)
    torch.set_num_threads(1)
    percent = {rate: 100 * sizes.deltas[rate] / sizes.nbytes for rate in RATES}
    for rate in RATES:
        print(
            f"  one step at {rate}: {sizes.changed[rate]:.2%} of elements changed, delta "
            f"{sizes.deltas[rate]} bytes, {percent[rate]:.3f} % of {sizes.nbytes}"
        )
    ratio = sizes.deltas[RATES[0]] / sizes.xor
    print(f"  at {RATES[0]}: {ratio:.3f} of XOR with zstd level 1 ({sizes.xor} bytes)")
    encode, apply = measure_codec(
        sizes.states, options.megabytes * 1_000_000, min(9, options.rounds)
    )
    print(f"  encode {encode:.2f} GB/s, apply {apply:.2f} GB/s, one thread", flush=True)
    return {
        "delta_percent": {rate: round(share, 3) for rate, share in percent.items()},
        "delta_over_xor_zstd": round(ratio, 3),
        "encode_gb_s": round(encode, 2),
        "apply_gb_s": round(apply, 2),
    }


def _readers(url: str, options: argparse.Namespace) -> dict[str, object]:
    with (
        readers(url, options.megabytes, READERS) as workers,
        redrb.connect(url) as client,
    ):
        source = Changing(large_model(options.megabytes))
        redrb.WeightPublisher(client, "first").publish({"tiny": torch.zeros(8)})
        redrb.WeightPublisher(client, "alone", deltas=False).publish(source.model)
        workers[0].ask("peak", "alone", "first")
        grown, nbytes = workers[0].result()
        print(f"fetch in place grew a process by {grown / 1e6:.1f} MB at most", flush=True)
        seconds = host_cache(client, source, workers, max(1, options.rounds // 3))
        print("readers that load a full version at once:")
        medians = _print_seconds(seconds, nbytes)
        spent = wakes(client, workers, options.publishes)
    percentiles = statistics.quantiles(spent, n=100)
    print(
        f"publish to awake, {READERS} readers, {options.publishes} versions: median "
        f"{percentiles[49]:.2f} ms, p99 {percentiles[98]:.2f} ms, most {max(spent):.2f} ms"
    )
    ratio = medians[f"{READERS} host cache"] / medians["1 host cache"]
    return {
        "host_cache_8_over_1": round(ratio, 2),
        "peak_extra_memory": round(grown / nbytes, 4),
        "wake_p99_ms": round(percentiles[98], 2),
    }


PARTS: dict[str, Callable[[str, str, argparse.Namespace], dict[str, object]]] = {
    "transport": _transport,
    "deltas": lambda tuned, _, options: _deltas(tuned, options),
    "readers": lambda tuned, _, options: _readers(tuned, options),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500, help="size of the state")
    parser.add_argument("--rounds", type=int, default=17)
    parser.add_argument("--peer-rounds", type=int, default=3, help="rounds of ways with one key")
    parser.add_argument("--steps", type=int, default=100, help="steps of training before deltas")
    parser.add_argument("--threads", type=int, default=2, help="threads that train")
    parser.add_argument("--publishes", type=int, default=400, help="versions that readers wait for")
    parser.add_argument("--only", choices=sorted(PARTS), help="one part of it")
    parser.add_argument("--server", help="path of a redis-server; default: the one on PATH")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, on which {os.getloadavg()[0]:.1f} processes ran already")
    result: dict[str, object] = {}
    for name in [options.only] if options.only else PARTS:
        with (
            private_server(options.server, variables=ALLOCATOR) as tuned,
            private_server(options.server) as plain,
        ):
            print(f"{name}: {tuned.name}", flush=True)
            result.update(PARTS[name](tuned.url, plain.url, options))
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
