"""The page in Chromium, from a file and without a network: numbers, keyboard, colours, widths, accessibility."""

import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from explored import page_of, simulation, variant

from fusco.cli.explore.records import record_views
from fusco.cli.explore.views import Page, write_page
from fusco.placement import Balance

OPENS_MS = 2000


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write each page once: plans by their size, and one of records and simulations."""
    folder = tmp_path_factory.mktemp("pages")

    def path_of(name):
        path = folder / f"{name}.html"
        if not path.exists():
            if name == "records":
                records = [variant("fusco", 1.9, 2.2), variant("baseline", 4.0, 4.5)]
                records += [
                    simulation(system, call) for system in ("fusco", "nccl") for call in ("dispatch", "combine")
                ]
                records += [simulation(call="dispatch", nodes=nodes, makespan_ms=nodes) for nodes in (16, 128)]
                page = Page(title="All", subtitle="", facts={}, views=record_views(records, Balance(2)), origin="")
            else:
                page = page_of(*map(int, name.split("x")))
            write_page(page, path)
        return path

    return path_of


@pytest.fixture
def show(browser, files):
    """Open a page in a context of its own; requests and messages of the console are collected, and none may come."""
    contexts = []

    def opened(name, width=1280, scheme="light", **more):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True, **more
        )
        contexts.append(context)
        page = context.new_page()
        seen = SimpleNamespace(requests=[], errors=[])
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("console", lambda message: seen.errors.append(message.text))
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        page.goto(Path(files(name)).as_uri())
        page.seen = seen
        return page

    yield opened
    for context in contexts:
        context.close()


def data_of(page):
    return page.evaluate("JSON.parse(document.getElementById('data').textContent)")


def wait_until(page, condition):
    """Wait, at most 10 s, for JavaScript to be true; ``wait_for_function`` needs ``eval``, which the page forbids."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"{condition} is not true after 10 s")


def open_tables(page):
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    wait_until(page, "[...document.querySelectorAll('details')].every((each) => each.querySelector('table'))")


def numbers_of(page, anchor):
    """The numbers in a view's tables, by row: those behind what is shown."""
    rows = "#%s tbody tr" % anchor  # noqa: UP031  braces are JavaScript's
    script = "(rows) => rows.map((row) => [...row.querySelectorAll('data')].map((each) => Number(each.value)))"
    return page.eval_on_selector_all(rows, script)


@pytest.mark.parametrize("name", ["8x8", "64x8", "140x72", "records"])
def test_it_opens_at_once_without_a_request_or_an_error(show, files, name):
    page = show(name)
    milliseconds = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    data = data_of(page)
    assert page.locator("main section").count() == len(data["views"])
    page.mouse.move(400, 500)
    page.evaluate("document.querySelector('#copies details').open = true")
    page.wait_for_selector("#copies table")
    assert page.seen.errors == []
    assert len(page.seen.requests) == 1
    assert milliseconds < OPENS_MS
    assert files(name).stat().st_size < 5e6


@pytest.mark.parametrize(
    ("name", "width", "scheme"), [("4x4", 1280, "dark"), ("64x8", 390, "light"), ("records", 390, "light")]
)
def test_there_is_no_violation_of_accessibility(show, name, width, scheme):
    try:
        from axe_playwright_python.sync_playwright import Axe  # noqa: PLC0415  it is optional
    except ImportError:
        pytest.skip("axe-playwright-python is not installed")
    page = show(name, width, scheme)
    if name != "64x8":
        open_tables(page)
    results = Axe().run(page)
    assert results.violations_count == 0, results.generate_report()


@pytest.mark.parametrize("name", ["4x4", "140x72", "records"])
def test_nothing_is_wider_than_a_phone(show, name):
    page = show(name, width=390)
    if name != "140x72":
        open_tables(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("name", ["4x4", "records"])
def test_what_is_shown_of_a_number_is_its_value(show, name):
    page = show(name)
    open_tables(page)
    cells = page.eval_on_selector_all("data", "(all) => all.map((each) => [Number(each.value), each.textContent])")
    assert len(cells) > 50
    for value, text in cells:
        shown = float(re.sub(r"[^\d.eE+-]", "", text))
        assert (shown / 100 if "%" in text else shown) == pytest.approx(value, rel=6e-3, abs=6e-4), text


def test_numbers_of_tables_are_those_of_the_json(show):
    page = show("4x4")
    open_tables(page)
    copies, links, matrix, experts, timeline, replay = data_of(page)["views"]
    assert [row[0] for row in numbers_of(page, "copies")] == [bar["rows"] for bar in copies["bars"]]
    by_rank = zip(*(each[way] for each in links["balancers"] for way in ("sends", "receives")), strict=True)
    ratios = [each[way] for each in links["balancers"] for way in ("send_ratio", "receive_ratio")]
    assert numbers_of(page, "links") == [ratios, *map(list, by_rank)]
    after = matrix["after"]
    sums = [
        [sum(matrix["before"][i]), sum(after[i]), sum(row[i] for row in matrix["before"]), sum(row[i] for row in after)]
        for i in range(16)
    ]
    assert numbers_of(page, "traffic") == [[*sums[i], *after[i]] for i in range(16)]
    columns = zip(experts["ratio_before"], experts["ratio_after"], experts["copies"], experts["before"], strict=True)
    assert numbers_of(page, "experts") == [[*first, *rows] for *first, rows in columns]
    assert numbers_of(page, "time") == list(map(list, zip(timeline["begin_us"], timeline["end_us"], strict=True)))
    flows = zip(replay["gbs"], replay["begin_us"], replay["end_us"], strict=True)
    assert numbers_of(page, "replay") == list(map(list, flows))


@pytest.mark.parametrize("name", ["4x4", "140x72", "records"])
def test_the_slider_goes_by_keyboard(show, name):
    page = show(name)
    slider, scene = page.locator("input[type=range]"), page.locator("#replay canvas").first
    picture = "(canvas) => canvas.toDataURL()"
    said, shown = slider.get_attribute("aria-valuetext"), scene.evaluate(picture)
    assert re.fullmatch(r"[\d.]+ (us|ms), \d+ (flows?|nodes send|ranks send), [\d.,]+ GB/s", said)
    slider.focus()
    slider.press("PageUp")
    assert slider.get_attribute("aria-valuetext") != said
    assert page.locator("#replay output").text_content() == slider.get_attribute("aria-valuetext")
    slider.press("End")
    assert scene.evaluate(picture) != shown
    assert scene.get_attribute("aria-label").startswith("At ")


def test_a_moment_of_the_replay_is_the_sum_of_its_flows(show):
    page = show("4x4")
    view = data_of(page)["views"][-1]
    for at in (0.0, 0.2 * view["total_us"], 0.7 * view["total_us"]):
        spans = zip(view["src"], view["gbs"], view["begin_us"], view["end_us"], strict=True)
        sends = [0.0] * view["num_ends"]
        for src, gbs, begin, end in spans:
            sends[src] += gbs if begin <= at < end else 0.0
        moment = page.evaluate("([view, at]) => momentOf(view, at)", [view, at])
        assert moment["sends"] == pytest.approx(sends)
        assert moment["total"] == pytest.approx(sum(sends))


def test_play_moves_on_and_stops_but_steps_without_motion(show):
    page = show("4x4")
    slider = page.locator("input[type=range]")
    before = int(slider.input_value())
    page.get_by_role("button", name="Play").click()
    wait_until(page, f"Number(document.querySelector('input[type=range]').value) > {before + 3}")
    page.get_by_role("button", name="Pause").click()
    still = show("4x4", reduced_motion="reduce")
    still.get_by_role("button", name="Step").click()
    assert int(still.locator("input[type=range]").input_value()) == before + 10
    still.wait_for_timeout(100)
    assert int(still.locator("input[type=range]").input_value()) == before + 10


def test_ranks_of_a_node_are_shown_by_number_and_by_click(show):
    page = show("64x8")
    matrix = page.locator("#traffic")
    assert matrix.locator("canvas").count() == 2
    matrix.get_by_label("Ranks of node").fill("5")
    rows = data_of(page)["views"][2]["ranks_after"][40:48]
    ranks = matrix.get_by_role("img", name="Sent: a copy for each node: ranks 40 to 47 of node 5")
    assert f"send {sum(map(sum, rows)):,} rows, the busiest {max(map(sum, rows)):,}" in ranks.get_attribute(
        "aria-label"
    )
    matrix.get_by_label("Ranks of node").fill("")
    assert matrix.locator("canvas").count() == 2
    matrix.locator("canvas").first.click(position={"x": 120, "y": 200})
    assert matrix.locator("canvas").count() == 4
    links = page.locator("#links")
    links.locator("canvas").first.click(position={"x": 300, "y": 40})
    node = int(links.get_by_label("Ranks of node").input_value())
    strip = links.locator("canvas").first.bounding_box()
    assert node == int((300 - 4) * 64 / (strip["width"] - 60))


def test_colours_follow_the_scheme(show):
    page = show("4x4")
    picture = "() => [...document.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL())"
    background = "() => getComputedStyle(document.body).backgroundColor"
    light, light_page = page.evaluate(picture), page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    wait_until(page, f"({background})() !== '{light_page}'")
    page.wait_for_timeout(100)
    assert all(before != after for before, after in zip(light, page.evaluate(picture), strict=True))


def test_the_scale_of_colours_is_even_in_lightness(show):
    """Lightness of OKLab, computed back from sRGB, is linear in the share."""
    page = show("4x4")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colours = page.evaluate("() => range(11).map((i) => heat(i / 10))")
        lightness = [oklab_lightness(*colour) for colour in colours]
        steps = [after - before for before, after in pairwise(lightness)]
        assert max(steps) - min(steps) < 0.012
        assert abs(lightness[-1] - lightness[0]) > 0.6


def oklab_lightness(*srgb):
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in srgb))
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    medium = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return 0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short


def test_a_screen_reader_hears_the_findings(show):
    page = show("4x4")
    data = data_of(page)
    heard = page.locator("body").aria_snapshot()
    assert f'heading "{data["title"]}" [level=1]' in heard
    for view in data["views"]:
        assert f'heading "{view["title"]}" [level=2]' in heard
        assert f'link "{view["question"]}"' in heard
    names = page.eval_on_selector_all("canvas", "(all) => all.map((each) => each.getAttribute('aria-label'))")
    assert len(names) == 12
    assert all(re.search(r"\d", name) for name in names)
