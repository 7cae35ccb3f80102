"""The report of a night: its section, its pictures, and one page of HTML that obeys nobody's text."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from test_scheduler import experiments as rows
from test_scheduler import plan, target

from autokernel import chronicle, page, pictures, scheduler
from autokernel.experiments import Experiment, Outcome
from autokernel.hardware import Limits
from autokernel.results import Status

LIMITS = Limits(4800.0, {"float16": 989.0}, "datasheet")
SOFTMAX = target("kernel_softmax_1", 400.0, 100.0, shape={"M": 4096, "N": 4096})


def experiment(number: int, outcome: Outcome, **changes: Any) -> Experiment:
    values: dict[str, Any] = {
        "target": "kernel_softmax_1",
        "operation": "softmax",
        "agent": "tuner",
        "description": "TILE 1 -> 2",
    }
    return Experiment(number=number, outcome=outcome, **{**values, **changes})


NIGHT = [
    experiment(1, Outcome.STARTED, verdict=Status.PASS, speedup_vs_pytorch=1.0),
    experiment(2, Outcome.KEPT, verdict=Status.PASS, speedup_vs_pytorch=1.5, speedup_vs_incumbent=1.5, commit="c" * 40),
    experiment(3, Outcome.REVERTED, verdict=Status.PASS, speedup_vs_pytorch=1.4, agent_s=1.0, judge_s=3.0),
    experiment(4, Outcome.REVERTED, verdict=Status.FAIL, reason="smoke: off | by <1>", judge_s=2.0),
    experiment(5, Outcome.REVERTED, verdict=Status.FAIL, reason="smoke: off", judge_s=2.0),
    experiment(6, Outcome.AGENT_TIMEOUT, agent_s=60.0),
    experiment(7, Outcome.REVERTED, verdict=Status.SCREENED, speedup_vs_pytorch=0.9),
]


def test_the_section_tells_what_was_kept_and_what_was_wasted() -> None:
    text = chronicle.section({"night": "n"}, NIGHT, lambda e: f"--- a\n+++ b\n-old\n+new {e.number}\n")
    assert "- night: n" in text
    assert re.search(r"\| 2 +\| kernel_softmax_1 \| TILE 1 -\\> 2 \| 1\.500x +\| 1\.500x +\| unmeasured \| c{12} ", text)
    assert "```diff\n--- a\n+++ b\n-old\n+new 2\n```" in text
    assert "new 3" not in text
    wasted = text.split("### Wasted experiments")[1]
    assert re.search(r"\| FAIL +\| 2 +\| 29% +\| 4 +\| smoke: off ", wasted)
    for reason, count in (("correct, but not shown to be faster", 1), ("no faster in a brief timing", 1), ("agent timeout", 1)):
        assert re.search(rf"\| {reason} +\| {count} ", wasted)
    assert "kept" not in wasted


def test_a_diff_cannot_end_its_fence_and_a_long_one_is_cut() -> None:
    text = chronicle.section({}, NIGHT, lambda e: "+```\n" + "+x\n" * 500)
    assert "````diff\n+```\n" in text
    assert "381 more lines in workspace/experiments/2/change.diff" in text


def test_without_experiments_there_is_no_section() -> None:
    assert chronicle.section({"night": "n"}, [], lambda e: "") == ""


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_is_self_contained_and_shows_text_as_it_is() -> None:
    hostile = '<script>alert(1)</script> [x](javascript:alert(1)) ![y](https://example.org/x.png) `a` | b <img src="z">'
    night = [*NIGHT, experiment(8, Outcome.KEPT, verdict=Status.PASS, description=hostile, reason=hostile)]
    text = chronicle.section({"agent": hostile}, night, lambda e: f"-<b>old</b>\n+{hostile}\n")
    text += f"\n\n![Progress](p.png)\n\n{hostile}\n"
    html = page.page("A <title>", text, {"p.png": b"\x89PNG"})
    tags = Tags(html)
    assert not {"script", "b", "a"} & set(tags.found)
    assert tags.links == ["data:image/png;base64,iVBORw=="]
    assert tags.found.count("title") == 1
    assert "alert(1)" in html  # it is there to be read
    assert "<del>-&lt;b&gt;old&lt;/b&gt;</del>" in html


def test_the_pictures() -> None:
    candidates = scheduler.rank(plan(SOFTMAX), rows((SOFTMAX, "PASS", 2.0)))
    for png in (
        pictures.progress(NIGHT),
        pictures.roofline(candidates, LIMITS),
        pictures.time_split(plan(SOFTMAX), candidates),
    ):
        assert png is not None
        assert png.startswith(b"\x89PNG")


def test_nothing_unmeasured_is_drawn() -> None:
    candidates = scheduler.rank(plan(SOFTMAX), rows((SOFTMAX, "PASS", None)))
    unmeasured = [experiment(1, Outcome.STARTED, verdict=Status.PASS)]
    assert pictures.progress(unmeasured) is None
    assert pictures.roofline(candidates, None) is None
    assert pictures.time_split(plan(SOFTMAX), candidates) is None


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_has_a_reason(outcome: Outcome) -> None:
    assert chronicle.reason_of(experiment(1, outcome, verdict=Status.CRASH))
