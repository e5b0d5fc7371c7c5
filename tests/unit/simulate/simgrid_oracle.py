"""Ends of flows by SimGrid, for the test of its name: reads problems as JSON from stdin, writes lists of times.

Run by a Python that has SimGrid's bindings. A problem has ``capacity`` of links, ``routes`` (links of each flow) and
``num_bytes`` of flows, which all start at once. Model CM02 without latencies is max-min fair sharing.
"""

import json
import multiprocessing
import sys

_SETTINGS = (
    "network/model:CM02",
    "network/crosstraffic:no",
    "network/TCP-gamma:0",
    "network/bandwidth-factor:1",
    "maxmin/precision:1e-12",
    "surf/precision:1e-12",
)


def run(problem):
    from simgrid import Actor, Comm, Engine, LinkInRoute, NetZone  # noqa: PLC0415  pytest collects this file without it

    engine = Engine(["oracle", *(f"--cfg={each}" for each in _SETTINGS), "--log=root.thres:critical"])
    zone = NetZone.create_full_zone("zone")
    links = [zone.create_link(f"link{i}", [rate]).set_latency(0).seal() for i, rate in enumerate(problem["capacity"])]
    ends = []
    for i, route in enumerate(problem["routes"]):
        src, dst = (zone.create_host(f"{end}{i}", 1e9).seal() for end in ("src", "dst"))
        zone.add_route(src.netpoint, dst.netpoint, None, None, [LinkInRoute(links[link]) for link in route], False)
        ends.append((src, dst))
    zone.seal()
    times = [0.0] * len(ends)

    def send(i):
        Comm.sendto_async(ends[i][0], ends[i][1], problem["num_bytes"][i]).wait()
        times[i] = Engine.clock

    for i, (src, _) in enumerate(ends):
        Actor.create(f"actor{i}", src, send, i)
    engine.run()
    return times


if __name__ == "__main__":
    problems = json.load(sys.stdin)
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # SimGrid allows one engine a process
        sys.stdout.write("RESULT " + json.dumps(pool.map(run, problems, chunksize=1)) + "\n")
