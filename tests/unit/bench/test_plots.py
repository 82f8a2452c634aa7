"""Figures: they show what the records say, can be read, are the same every time, and refuse what they cannot show."""

import itertools
import json
import math
import random

import pytest

matplotlib = pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex  # noqa: E402
from matplotlib.image import imread  # noqa: E402
from matplotlib.text import Text  # noqa: E402

from segue.base.errors import InvalidRequest  # noqa: E402
from segue.bench import pictures, plots  # noqa: E402
from segue.bench.looks import Looks, Series  # noqa: E402
from segue.bench.results import Choice, read_counts, read_results, read_turns  # noqa: E402
from segue.bench.sheet import save, spread  # noqa: E402
from segue.cli import plot  # noqa: E402

POLICIES = ("fcfs", "priority", "continuum", "continuum-released", "context_serve", "adaptive", "oracle", "fixed-2s")
HOST = ("host=16GiB",)
GPUS = ("rtx6000", "rtx5090", "a100-40", "l40s", "h100", "h200", "cpu")


def run_record(policy="fcfs", tiers=(), gpu="rtx5090", jps=2.0, seed=0, seconds=5.0, **more):
    return {
        "kind": "run", "workload": "agents", "policy": policy, "tiers": list(tiers), "gpu": gpu, "gpu_title": f"{gpu} (32 GB)",
        "jps": jps, "seed": seed, "blocks": 5402, "avg_duration_s": seconds, "p90_duration_s": seconds * 1.4,
        "per_turn_avg_latency_ms": {str(turn): seconds * 30 * turn for turn in range(1, 9)},
    } | more  # fmt: skip


def sweep(policies=POLICIES, gpus=("rtx5090",), loads=(1, 2, 4, 8, 12), seeds=(0, 1), spread_by=1.0):
    """Job times that grow with load, and are close together for some policies."""
    randomly = random.Random(5)
    for gpu, policy, tiers, jps, seed in itertools.product(gpus, policies, ((), HOST), loads, seeds):
        place = POLICIES.index(policy) + (4 if tiers else 0)
        seconds = 5 + jps ** (1.2 * spread_by) / (1 + place / 2) + 0.01 * randomly.random()
        yield run_record(policy, tiers, gpu, jps, seed, seconds)


def trace(policies=("fcfs", "adaptive"), gpu="rtx5090", jps=8, seed=0, num_jobs=40, **more):
    same = {"gpu": gpu, "jps": jps, "seed": seed, **more}
    for policy, job in itertools.product(policies, range(num_jobs)):
        at = job * 0.5
        for turn in range(3):
            wait = 0.1 if policy == "adaptive" else 0.4
            times = {"asked_at": at, "first_token_at": at + wait, "ended_at": at + wait + 0.5}
            yield {"kind": "turn", "policy": policy, **same, "job": f"job-{job:05d}", "turn": turn, **times}
            at += wait + 1.5
    for policy, at in itertools.product(policies, range(60)):
        running, leased = 10 * at, 5 * at if policy == "adaptive" else 0
        counts = {"running": running, "leased": leased, "cached": 100, "free": 900 - running - leased}
        yield {"kind": "blocks", "policy": policy, **same, "at": at * 0.25, **counts}


@pytest.fixture
def file(tmp_path):
    def write(*records):
        path = tmp_path / f"{len(list(tmp_path.glob('*.jsonl')))}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


def command(*arguments):
    """As the `segue` command calls it; how it is called there is that command's own matter."""
    import argparse

    command = argparse.ArgumentParser()
    plot.add_arguments(command)
    return plot.run(command.parse_args([str(argument) for argument in arguments]))


def texts(figure):
    """All that can be read in it."""
    figure.canvas.draw()
    edges = {"xaxis": "xlim", "yaxis": "ylim"}
    hidden = set()
    for axes, (name, limits) in itertools.product(figure.axes, edges.items()):
        low, high = sorted(getattr(axes, f"get_{limits}")())
        for tick in getattr(axes, name).get_major_ticks():
            if not low - 1e-9 <= tick.get_loc() <= high + 1e-9:
                hidden |= {tick.label1, tick.label2}
    found = figure.findobj(
        lambda artist: isinstance(artist, Text) and artist.get_visible() and artist.get_text().strip()
    )
    return [text for text in found if text not in hidden]


def assert_readable(figure):
    """Texts lie within the figure and on no other text."""
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in texts(figure)]
    whole = figure.bbox
    for name, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= whole.x1 and box.y1 <= whole.y1, name
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        apart = a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0
        deep = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert apart or min(deep) < 1.5, f"{one!r} is on {other!r}"  # pixels, most of them the leading


def only(figures):
    (figure,) = figures.values()
    return figure


def lines(axes):
    return {
        line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines if line.get_label()[0] != "_"
    }


# What is shown is what was measured


def test_load_shows_means_over_seeds_and_p90(file):
    path = file(
        run_record(seconds=4.0, seed=0), run_record(seconds=6.0, seed=1), run_record(jps=8, seconds=20.0),
        run_record("adaptive", HOST, seconds=3.0),
    )  # fmt: skip
    figures = plots.load(read_results([path]))
    assert list(figures) == ["load-rtx5090"]
    (axes,) = only(figures).axes
    assert lines(axes) == {"fcfs": [(2, 5), (8, 20)], "adaptive + host": [(2, 3)]}
    p90 = [line.get_ydata().tolist() for line in axes.lines if line.get_label()[0] == "_"]
    assert p90 == [pytest.approx([7, 28]), pytest.approx([4.2])]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("jobs a second", "mean job time, s")
    shown = [text.get_text() for text in texts(only(figures))]
    assert "Job time on rtx5090 (32 GB), 5,402 blocks" in shown
    assert {"fcfs", "adaptive + host", "agents; means of 1 to 2 seeds; thin dashed lines: 90th percentile"} <= set(
        shown
    )


def test_a_logarithmic_axis_says_so_and_is_for_values_far_apart(file):
    near, far = (file(run_record(seconds=1.0), run_record(jps=8, seconds=seconds)) for seconds in (14.0, 15.0))
    (axes,) = only(plots.load(read_results([near]))).axes
    assert (axes.get_yscale(), axes.get_ylabel()) == ("linear", "mean job time, s")
    figure = only(plots.load(read_results([far])))
    assert (figure.axes[0].get_yscale(), figure.axes[0].get_ylabel()) == ("log", "mean job time, s (log scale)")
    assert_readable(figure)


def test_gain_is_against_fcfs_without_tiers_with_the_same_seeds(file):
    path = file(
        run_record(seconds=10.0, seed=0), run_record(seconds=1000.0, seed=7), run_record("fcfs", HOST, seconds=9.0),
        run_record("adaptive", seconds=4.0), run_record("priority", seconds=15.0), run_record("adaptive", jps=3),
        run_record("adaptive", gpu="l40s"),
    )  # fmt: skip
    (axes,) = only(plots.gain(read_results([path]))).axes  # the other GPU has nothing to compare with
    assert lines(axes) == {"fcfs + host": [(2, 10)], "adaptive": [(2, 60)], "priority": [(2, -50)]}
    assert axes.get_ylabel() == "mean job time saved, %"
    assert any(line.get_ydata() == [0, 0] for line in axes.lines)
    with pytest.raises(InvalidRequest, match="no load that was run with fcfs"):
        plots.gain(read_results([file(run_record("adaptive"))]))


def test_turns_are_those_of_one_gpu_and_load(file):
    path = file(
        *sweep(("fcfs", "adaptive"), ("rtx5090", "l40s"), loads=(2, 8), seeds=(0,)),
        run_record(jps=8, seconds=7.0, seed=1),
    )
    results = read_results([path])
    figures = pictures.turns(results)
    assert list(figures) == ["turns-rtx5090-8"]
    first, *_ = figure_axes = only(figures).axes
    fcfs = [
        each.mean_seconds
        for each in results
        if each.series == Series("fcfs") and (each.gpu, each.jps) == ("rtx5090", 8)
    ]
    expected = sum(fcfs) / 2 * 30 / 1e3
    assert [bar.get_height() for bar in first.patches] == pytest.approx([expected * turn for turn in range(1, 9)])
    assert [axes.get_title(loc="left") for axes in figure_axes] == [
        "fcfs",
        "fcfs + host",
        "adaptive",
        "adaptive + host",
    ]
    assert (first.get_ylabel(), first.get_xlabel()) == ("mean latency, s", "turn")
    assert len({axes.get_ylim() for axes in figure_axes}) == 1
    assert list(pictures.turns(results, Choice("l40s", 2.0))) == ["turns-l40s-2"]


def test_blocks_are_stacked_by_state(file):
    figure = only(pictures.blocks(read_counts([file(*trace())])))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["fcfs", "adaptive"]
    assert (figure.axes[1].get_xlabel(), figure.axes[1].get_ylabel()) == ("time, s", "blocks")
    assert figure.axes[1].get_ylim() == (0, 1000)
    running, leased, cached, free = figure.axes[1].collections
    tops = [max(path.vertices[:, 1].max() for path in each.get_paths()) for each in (running, leased, cached, free)]
    assert tops == [590, 590 + 295, 590 + 295 + 100, 1000]
    assert {"running", "leased", "cached", "free"} <= {text.get_text() for text in texts(figure)}


def test_jobs_wait_and_are_answered(file):
    figure = only(pictures.jobs(read_turns([file(*trace())]), num_jobs=5))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["fcfs", "adaptive"]
    axes = figure.axes[0]
    waits, answers = (container.patches for container in axes.containers)
    assert len(waits) == len(answers) == 5 * 3
    assert [bar.get_x() for bar in waits[:4]] == pytest.approx([0, 1.9, 3.8, 0.5])
    assert [bar.get_width() for bar in waits] == pytest.approx([0.4] * 15)
    assert [bar.get_x() for bar in answers[:3]] == pytest.approx([0.4, 2.3, 4.2])
    gaps = [(start[0], end[0]) for start, end in axes.collections[0].get_segments()]
    assert gaps[:2] == [pytest.approx((0.9, 1.9)), pytest.approx((2.8, 3.8))]
    assert axes.get_ylabel() == "job" and figure.axes[1].get_xlabel() == "time, s"


def test_a_picture_is_of_one_run(file):
    twice = file(*trace(), *trace())
    for draw, read in ((pictures.jobs, read_turns), (pictures.blocks, read_counts)):
        with pytest.raises(InvalidRequest, match="two runs with fcfs"):
            draw(read([twice]))
        apart = file(*trace(), *trace(seed=1), *trace(jps=4), *trace(gpu="l40s"), *trace(tiers=list(HOST)))
        figure = only(draw(read([apart])))
        titles = [axes.get_title(loc="left") for axes in figure.axes]
        assert titles == ["fcfs", "fcfs + host", "adaptive", "adaptive + host"]
        assert "8 jobs a second, seed 0" in {text.get_text() for text in texts(figure)}


# Looks


def test_colours_say_the_policy_and_lines_the_tiers():
    few, many = Looks([Series("adaptive")]), Looks(Series(policy, tiers) for policy in POLICIES for tiers in ((), HOST))
    assert few.colour(Series("adaptive")) == many.colour(Series("adaptive")) == many.colour(Series("adaptive", HOST))
    assert len({many.colour(Series(policy)) for policy in POLICIES}) == len(POLICIES)
    plain, host = many.line(Series("fcfs")), many.line(Series("fcfs", HOST))
    assert plain["linestyle"] != host["linestyle"] and plain["marker"] != host["marker"]
    assert many.ordered[:3] == [Series("fcfs"), Series("fcfs", HOST), Series("priority")]
    fixed = Looks(Series(f"fixed-{seconds}s") for seconds in (2, 10, 0.5))
    assert [each.policy for each in fixed.ordered] == ["fixed-0.5s", "fixed-2s", "fixed-10s"]


def test_labels_have_sizes_only_where_they_differ_and_never_addresses():
    secret = ("remote=redis://:secret@host:6379/0",)
    tiers = [
        (),
        ("host=4GiB",),
        ("host=64GiB",),
        ("disk=/data/a,20GiB",),
        secret,
        ("remote=redis://:other@host:6379/1",),
    ]
    looks = Looks(Series("fcfs", each) for each in tiers)
    labels = [looks.label(Series("fcfs", each)) for each in tiers]
    assert labels == [
        "fcfs",
        "fcfs + host 4GiB",
        "fcfs + host 64GiB",
        "fcfs + disk",
        "fcfs + remote (2)",
        "fcfs + remote",
    ]
    assert len({str(looks.line(Series("fcfs", each))["linestyle"]) for each in tiers}) == len(tiers)


def test_labels_are_moved_apart_and_no_further():
    assert spread([0.2, 0.8], 0.1) == [0.2, 0.8]
    assert spread([0.5, 0.5], 0.1) == pytest.approx([0.55, 0.45])
    randomly = random.Random(3)
    for _ in range(50):
        wanted = [randomly.choice([0.0, 1.0, randomly.random()]) for _ in range(randomly.randint(1, 20))]
        places = spread(wanted, 0.05)
        assert sorted(places)[0] >= 0.025 - 1e-9 and sorted(places)[-1] <= 0.975 + 1e-9
        assert all(after - before >= 0.05 - 1e-9 for before, after in itertools.pairwise(sorted(places)))
        assert all(
            places[i] <= places[j] for i in range(len(places)) for j in range(len(places)) if wanted[i] < wanted[j]
        )


@pytest.mark.parametrize(("num_gpus", "spread_by"), [(1, 1.0), (1, 2.0), (2, 1.0), (3, 2.0), (4, 1.0), (7, 2.0)])
def test_everything_can_be_read(file, num_gpus, spread_by):
    results = read_results([file(*sweep(gpus=GPUS[:num_gpus], spread_by=spread_by))])
    for draw in (plots.load, plots.panels, plots.gain, pictures.turns):
        figure = next(iter(draw(results).values()))
        assert figure.get_figwidth() * figure.dpi == 1200 and to_hex(figure.get_facecolor()) == "#ffffff"
        assert_readable(figure)


@pytest.mark.parametrize("loads", [(3,), (1, 1.1, 1.2, 1.3, 2, 40), tuple(range(1, 31)), (0.25, 0.5)], ids=len)
def test_any_loads_can_be_read(file, loads):
    results = read_results([file(*sweep(("fcfs", "adaptive"), GPUS[:2], loads))])
    for figure in [*plots.load(results).values(), *plots.panels(results).values(), *plots.gain(results).values()]:
        assert_readable(figure)


@pytest.mark.parametrize("policies", [POLICIES[:1], POLICIES])
def test_pictures_can_be_read(file, policies):
    path = file(*trace(policies))
    assert_readable(only(pictures.blocks(read_counts([path]))))
    for num_jobs in (1, 100):
        assert_readable(only(pictures.jobs(read_turns([path]), num_jobs=num_jobs)))


def test_long_names_leave_room(file):
    names = [f"a-policy-from-elsewhere-with-a-long-name-{number}" for number in range(3)]
    records = [
        run_record(policy, gpu=gpu, jps=jps)
        for policy in (*names, "fcfs")
        for gpu in ("a" * 50, "b" * 50)
        for jps in (1, 9)
    ]
    results = read_results([file(*(record | {"model": "m" * 90, "workload": "w" * 90} for record in records))])
    for draw in (plots.load, plots.panels, plots.gain, pictures.turns):
        for figure in draw(results).values():
            assert_readable(figure)
            assert all(axes.bbox.width > 150 for axes in figure.axes)


# Files


def test_the_command_draws_all_that_there_are_records_for(file, tmp_path, capsys):
    path = file(*sweep(("fcfs", "adaptive"), GPUS[1:3]), *trace())
    assert command("all", path, "--out", tmp_path / "new" / "out", "--format", "png,svg", "--jobs", 5) == 0
    names = ["load-rtx5090", "load-a100-40", "panels", "gain", "turns-rtx5090-12", "blocks", "jobs"]
    expected = [str(tmp_path / "new" / "out" / f"{name}.{form}") for name in names for form in ("png", "svg")]
    assert capsys.readouterr().out.split() == expected
    assert imread(expected[0]).shape[1] == 1200
    assert command("all", file(run_record()), "--out", tmp_path / "few") == 0
    assert sorted(each.name for each in (tmp_path / "few").iterdir()) == [
        "load-rtx5090.png",
        "panels.png",
        "turns-rtx5090-2.png",
    ]
    said = capsys.readouterr().err
    assert "no blocks: " in said and "no jobs: " in said and "no gain: " in said


@pytest.mark.parametrize("kind", plot.KINDS)
def test_each_kind_alone_is_the_same_twice_whatever_ones_settings(file, tmp_path, kind):
    path = file(*sweep(("fcfs", "adaptive")), *trace())
    drawn = []
    for folder, size in ((tmp_path / "a", 10.0), (tmp_path / "b", 30.0)):
        with matplotlib.rc_context({"font.size": size, "axes.facecolor": "black"}):
            assert command(kind, path, "--out", folder, "--format", "png,svg") == 0
        drawn.append({each.name: each.read_bytes() for each in folder.iterdir()})
    assert drawn[0] == drawn[1] and len(drawn[0]) == 2
    assert all(b"matplotlib" not in content.lower().split(b"</metadata>")[0][:2000] for content in drawn[0].values())


def test_a_name_in_results_does_not_lead_out_of_the_folder(file, tmp_path):
    figures = plots.load(read_results([file(run_record(gpu="../../x $y$"))]))
    (path,) = save(figures, tmp_path / "out")
    assert path == tmp_path / "out" / "load-.._.._x_y_.png" and path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pie"], "kind: 'pie' is not known: there are load, panels, gain, turns, blocks, jobs and all"),
        (["load", "--format", "png,bmp"], "format: 'png,bmp' is not known"),
        (["load", "--gpu", "h100"], "gpu: nothing on 'h100': there is rtx5090"),
        (["all", "--gpu", "h100"], "gpu: nothing on 'h100'"),
        (["blocks", "--gpu", "h100"], "gpu: nothing on 'h100'"),
        (["turns", "--jps", "3"], "jps: nothing at 3 jobs a second on rtx5090: there is 2, 8"),
        (["jobs", "--jobs", "0"], "jobs: must be at least 1"),
    ],
)
def test_what_is_not_there_is_named(file, tmp_path, arguments, message):
    path = file(run_record(), run_record(jps=8), *trace())
    with pytest.raises(InvalidRequest) as error:
        command(*arguments[:1], path, *arguments[1:], "--out", tmp_path / "out")
    assert message in str(error.value)


def test_files_that_cannot_be_used(file, tmp_path):
    for kind in plot.KINDS:
        with pytest.raises(InvalidRequest, match=r"no '(run|turn|blocks)' records"):
            command(kind, file({"kind": "other"}), "--out", tmp_path / "out")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        command("all", tmp_path / "missing.jsonl", "--out", tmp_path / "out")
    with pytest.raises(InvalidRequest, match="cannot be written"):
        command("load", file(run_record()), "--out", file())
    with pytest.raises(InvalidRequest, match="have no latencies of turns"):
        command("turns", file(run_record(per_turn_avg_latency_ms={})), "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"avg_duration_s": math.nan}, "wrong value: nan is no finite number"),
        ({"jps": None}, "wrong value"),
        ({"per_turn_avg_latency_ms": [1]}, "wrong value"),
        ({"workload": "chat"}, "differ in workload, which no figure shows: 'agents' and 'chat'"),
        ({"blocks": 100}, "differ in blocks of rtx5090"),
        ({"coefficients": {"flops": 0.5}}, "differ in coefficients of rtx5090"),
    ],
)
def test_runs_that_do_not_fit(file, wrong, message):
    with pytest.raises(InvalidRequest, match=message):
        read_results([file(run_record(), run_record(jps=4) | wrong)])
    without = run_record()
    del without["gpu"]
    with pytest.raises(InvalidRequest, match="have a 'run' record without 'gpu'"):
        read_results([file(without)])


def test_without_matplotlib_the_command_says_what_to_install(file, tmp_path, monkeypatch):
    import sys

    for name in [name for name in sys.modules if name == "segue.bench.sheet"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidRequest, match=r"needs matplotlib: pip install 'segue\[plots\]'"):
        command("load", file(run_record()), "--out", tmp_path / "out")
