"""The page in a real browser without a network: on a phone, dark, hovered, printed, without scripts."""

import pytest

from tests.reports.browser import CHROMIUM, Browser, Page
from tests.reports.synthetic import write_comparison
from thinwire.reports.charts import CHARTS
from thinwire.reports.page import write_report

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on PATH: the page is not opened in a browser"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(write_comparison(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def open_page(browser):
    pages = []

    def opened(*args, **kwargs):
        pages.append(Page(browser, *args, **kwargs))
        return pages[-1]

    yield opened
    for page in pages:
        page.close()


INKED = """[...document.querySelectorAll('canvas')].every(canvas =>
    canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(byte => byte > 0))"""
# Relative luminance of an element's colour, 0 black to 1 white.
LUMINANCE = """(() => {const [r, g, b] = getComputedStyle(document.body)['%s'].match(/[\\d.]+/g).map(Number);
    return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_every_chart_is_drawn_without_errors_requests_or_sideways_scroll(open_page, report, width, dark):
    page = open_page(report, width, dark=dark)
    assert page.evaluate("innerWidth") == width
    assert page.evaluate("document.documentElement.dataset.errors ?? ''") == ""
    assert page.complaints() == []
    assert page.evaluate("document.querySelectorAll('.plot canvas').length") == len(CHARTS)
    assert page.evaluate(INKED)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert (
        page.evaluate("Math.max(...[...document.querySelectorAll('canvas')].map(c => c.clientWidth))")
        <= width
    )
    assert page.requested_urls() == [report.resolve().as_uri()]
    assert page.evaluate("document.documentElement.dataset.hacked ?? ''") == ""
    background, text = (page.evaluate(LUMINANCE % name) for name in ("backgroundColor", "color"))
    assert (background < 0.2 < 0.8 < text) if dark else (text < 0.2 < 0.8 < background)


def test_a_run_of_one_step_with_nan_is_drawn_without_errors(open_page, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "val/score": 0.5}\n{"step": 1, "critic/score/mean": 0.5, "rollout_corr/kl": NaN}\n'
    )
    page = open_page(write_report(tmp_path), 390)
    assert page.complaints() == []
    assert page.evaluate("document.querySelectorAll('.plot canvas').length") == 3
    assert page.evaluate("document.querySelector('#chart-0 .values b').textContent") == "0.500"


def test_charts_follow_a_resized_window(open_page, report):
    page = open_page(report, 1440)
    page.resize(390)
    page.wait("document.querySelector('canvas').clientWidth <= 390")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_hovering_one_chart_shows_the_values_of_that_step_in_every_chart(open_page, report):
    page = open_page(report, 1440)
    page.evaluate("document.querySelector('#chart-0 .u-over').scrollIntoView({block: 'center'})")
    box = page.evaluate(
        "(() => {const box = document.querySelector('#chart-0 .u-over').getBoundingClientRect();"
        "return [box.left, box.top, box.width, box.height]})()"
    )
    page.move_mouse(box[0] + box[2] / 2, box[1] + box[3] / 2)
    page.wait("document.querySelector('#chart-0 .at').textContent.startsWith('step')")
    heads = page.evaluate("[...document.querySelectorAll('.at')].map(head => head.textContent)")
    assert set(heads) == {"step 100, by seed"}
    shown = page.evaluate("document.querySelector('#chart-2 .values b').textContent")
    expected = page.evaluate(
        "(() => {const data = JSON.parse(document.getElementById('series').textContent);"
        "const chart = data.charts[2], at = data.x[chart.x].indexOf(100);"
        "return chart.lines.slice(0, 3).map(line => line[2][at])})()"
    )
    # Shown with two significant digits below a thousandth.
    assert [float(value) for value in shown.split()] == pytest.approx(expected, rel=0.05)


def test_an_arm_can_be_hidden_and_shown(open_page, report):
    page = open_page(report, 1440)
    entries = "document.querySelectorAll('#chart-0 .values .swatch').length"
    assert page.evaluate(entries) == 4
    page.evaluate("document.querySelector('.arms button').click()")
    assert page.evaluate(entries) == 3
    assert page.evaluate("document.querySelector('.arms button').getAttribute('aria-pressed')") == "false"
    page.evaluate("document.querySelector('.arms button').click()")
    assert page.evaluate(entries) == 4


def test_without_scripts_every_chart_is_an_svg_and_the_steps_can_still_be_chosen(open_page, report):
    page = open_page(report, 390, scripts=False)
    assert page.evaluate("document.querySelectorAll('canvas').length") == 0
    visible = (
        "[...document.querySelectorAll('figure svg')].filter(svg => svg.getBoundingClientRect().height > 100)"
    )
    assert page.evaluate(f"{visible}.length") == len(CHARTS)
    assert page.evaluate(f"{visible}.every(svg => svg.querySelectorAll('path.line').length === 12)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    panels = "[...document.querySelectorAll('.panel')].map(panel => panel.getBoundingClientRect().height > 0)"
    assert page.evaluate(panels) == [False, False, True]
    page.evaluate("document.querySelector('label[for=step-0]').click()")
    assert page.evaluate(panels) == [True, False, False]


def test_print_shows_the_vector_charts(open_page, report):
    page = open_page(report, 1440, dark=True)
    page.call("Emulation.setEmulatedMedia", media="print", features=[])
    assert page.evaluate(
        "[...document.querySelectorAll('figure svg')].every(s => s.getBoundingClientRect().height > 100)"
    )
    assert page.evaluate(
        "[...document.querySelectorAll('.plot')].every(p => p.getBoundingClientRect().height === 0)"
    )


def test_a_tampered_script_does_not_run_and_leaves_the_svg(open_page, report, tmp_path):
    """The policy holds by hash: the same page with one word more in its script shows the fallback instead."""
    changed = tmp_path / "changed.html"
    text = report.read_text().replace('"use strict";\n  const root', '"use strict"; 0;\n  const root')
    assert text != report.read_text()
    changed.write_text(text)
    page = open_page(changed, 1440, drawn=False)
    assert page.evaluate("document.querySelectorAll('canvas').length") == 0
    assert page.evaluate("document.querySelector('figure svg').getBoundingClientRect().height") > 100
