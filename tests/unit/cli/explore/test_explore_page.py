"""The page as a file: complete, safe, small, and with the views that its scripts expect."""

import dataclasses
import json
import re
from importlib import resources

import pytest
from explored import page_of

from fusco.cli.explore import views
from fusco.cli.explore.views import SCRIPTS, STYLES, Page, View, write_page

ASSETS = resources.files("fusco.cli.explore").joinpath("assets")
KINDS = [each for each in vars(views).values() if isinstance(each, type) and issubclass(each, View) and each != View]


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


@pytest.fixture(scope="module")
def small():
    page = page_of(2, 4)
    return page, page.to_html()


def test_the_json_has_the_views(small):
    page, text = small
    data = data_of(text)
    assert data["title"] == page.title
    assert data["views"] == json.loads(json.dumps([dataclasses.asdict(view) for view in page.views]))
    assert [view["kind"] for view in data["views"]] == ["copies", "links", "matrix", "experts", "timeline", "replay"]


def test_texts_of_data_end_no_element(small):
    _, text = small
    assert data_of(text)["subtitle"] == "Drawn </script> & <b>"
    assert text.count("</script>") == 2


def test_a_title_is_escaped_in_the_head(small):
    page = dataclasses.replace(small[0], title="%DATA% <b>")
    assert "<title>%DATA% &lt;b&gt;</title>" in page.to_html()


def test_the_file_names_no_address_but_its_icon(small):
    """The policy in its head forbids all loads; there is nothing that would be loaded either."""
    _, text = small
    assert "default-src 'none'" in text
    assert re.findall(r"https?://|(?:src|href)\s*=\s*[\"'](?!#|data:,)|@import|url\(", text) == []


def test_a_page_without_views_or_with_nan_is_refused(small):
    with pytest.raises(ValueError, match="there is nothing to show of nothing"):
        Page(title="nothing", subtitle="", facts={}, views=[], origin="").to_html()
    broken = dataclasses.replace(small[0].views[0], bytes_per_row=float("nan"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        dataclasses.replace(small[0], views=[broken]).to_html()


def test_a_file_that_fails_leaves_the_earlier_one(small, tmp_path, monkeypatch):
    path = tmp_path / "plan.html"
    write_page(small[0], path)
    before = path.read_text()
    monkeypatch.setattr(views, "_asset", lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_page(small[0], path)
    assert path.read_text() == before == small[1]
    assert list(tmp_path.iterdir()) == [path]


def test_every_asset_is_on_the_page():
    names = {path.name for path in ASSETS.iterdir()}
    assert names == {"page.html", *SCRIPTS, *STYLES}


@pytest.mark.parametrize("kind", [*KINDS, views.Bar, views.BalancerLoads, views.Run, views.Prediction, views.Constant])
def test_scripts_expect_the_fields_that_views_have(kind):
    """Types of the scripts, ``{kind: "copies", bars: Bar[], ...}``, have the names of the dataclasses' fields."""
    scripts = "\n".join(ASSETS.joinpath(name).read_text() for name in SCRIPTS)
    text = re.sub(r"\n \*\s*", " ", scripts)
    typedef = re.search(rf"@typedef {{(?:View & )?{{([^}}]*)}}}} {kind.__name__}\b", text)
    expected = re.findall(r"(\w+):", typedef[1])
    of_view = {field.name for field in dataclasses.fields(View)} if issubclass(kind, View) else set()
    assert set(expected) == {field.name for field in dataclasses.fields(kind)} - of_view
