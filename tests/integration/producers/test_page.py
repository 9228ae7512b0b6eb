"""The page in headless Chromium, against a real gateway: what a person sees and can do. Screenshots go to build/page/."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiokafka import AIOKafkaProducer
from bad_manifests import good_manifest
from opentinker.schemas.messages import JobPhase, LogLines, TrainingMetrics
from opentinker.schemas.topics import LOGS, METRICS, STATUS
from ports import free_port

from .conftest import API_KEY, running, unique
from .test_gateway import database, say, status_of

playwright = pytest.importorskip("playwright.async_api")
expect = playwright.expect

PICTURES = Path(__file__).parents[3] / "build" / "page"
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
__all__ = ["database"]  # the fixture this module shares with the gateway's tests


@pytest.fixture(scope="session")
async def browser() -> AsyncIterator[Any]:
    binary = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if binary is None:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail("no Chromium; install it or name it in CHROMIUM")
        pytest.skip("no Chromium; install it or name it in CHROMIUM")
    async with playwright.async_playwright() as tool:
        made = await tool.chromium.launch(executable_path=binary, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield made
        await made.close()


@pytest.fixture(scope="module")
async def site(stack: Any, api_key_file: Path, database: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway of the page's own."""
    port = free_port()
    variables = {"OPENTINKER_GATEWAY__PORT": str(port), "OPENTINKER_GATEWAY__API_KEY_FILE": str(api_key_file)}
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with (
        running(stack, "opentinker.producers.gateway", port, **variables),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False, timeout=30) as http,
    ):
        yield http


class Visit:
    """One tab, with everything that went wrong in it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.faults: list[str] = []
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on(
            "console", lambda message: self.faults.append(message.text) if message.type == "error" and "Failed to load" not in message.text else None
        )
        self.hosts: set[str] = set()
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    async def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        await self.page.screenshot(path=PICTURES / f"{name}.png")


@pytest.fixture
async def visit(browser: Any, site: httpx.AsyncClient) -> AsyncIterator[Visit]:
    context = await browser.new_context(viewport={"width": 1440, "height": 900}, locale="en-GB")
    tab = Visit(await context.new_page())
    yield tab
    await context.close()
    assert tab.faults == []
    assert tab.hosts <= {str(site.base_url.netloc, "ascii")}  # no foreign host, ever


async def a_job(site: httpx.AsyncClient, name: str = "", **spec: Any) -> dict[str, Any]:
    answer = await site.post("/v1/jobs", json=good_manifest(name or unique(), **spec))
    assert answer.status_code == 202, answer.text
    view: dict[str, Any] = answer.json()
    return view


async def test_the_key_is_asked_for_once_and_kept_out_of_the_address(visit: Visit, site: httpx.AsyncClient) -> None:
    job = await a_job(site)
    page = visit.page
    await page.goto(str(site.base_url))
    await expect(page.get_by_role("heading", name="API key needed")).to_be_visible()
    await visit.picture("1-door")
    await page.get_by_label("API key").fill("not the key")
    await page.get_by_role("button", name="Enter").click()
    await expect(page.get_by_text("This key was refused.")).to_be_visible()
    await page.get_by_label("API key").fill(API_KEY)
    await page.get_by_role("button", name="Enter").click()
    await expect(page.get_by_role("button", name=job["metadata"]["name"])).to_be_visible()
    await page.reload()
    await expect(page.get_by_role("button", name=job["metadata"]["name"])).to_be_visible()
    await page.goto(f"{site.base_url}/#key={API_KEY}&job={job['metadata']['uid']}")
    await expect(page.get_by_role("heading", name=f"default/{job['metadata']['name']}")).to_be_visible()
    assert API_KEY not in page.url
    await page.get_by_role("button", name="Forget key").click()
    await expect(page.get_by_role("heading", name="API key needed")).to_be_visible()
    assert await page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])") == '[{},{},""]'


async def test_a_job_is_followed_from_waiting_to_its_end(visit: Visit, site: httpx.AsyncClient, sender: AIOKafkaProducer) -> None:
    view = await a_job(site, replicas=4, hyperparameters={"learning_rate": 0.0003, "batch_size": 64})
    uid, name = view["metadata"]["uid"], view["metadata"]["name"]
    page = visit.page
    await page.goto(f"{site.base_url}/#key={API_KEY}")
    row = page.get_by_role("row").filter(has_text=name)
    await expect(row).to_contain_text("Pending")
    waiting = "needs 4 × (1 GPU, 2 CPU, 4 GiB); pool default has 3 free GPUs on 2 nodes"
    await say(sender, STATUS, status_of(view, JobPhase.PENDING, 2, reason="InsufficientCapacity", message=waiting), uid)
    await expect(row).to_contain_text(waiting)
    await page.get_by_role("button", name=name).click()
    panel = page.locator("#job")
    await expect(panel).to_contain_text("Why it waits")
    await expect(panel).to_contain_text(waiting)  # the read replica is away here: what the scheduler said last is shown
    await visit.picture("2-waiting")
    for number in range(1, 121):
        value = 500.0 if number == 60 else (number * 4.0) % 450
        values = {"mean_return": value, "value_loss": "NaN" if number == 80 else 1.0 / number, "episode_length": value}
        sample = TrainingMetrics(job_uid=uid, namespace="default", attempt_number=1 if number < 90 else 2, lease_epoch=1, replica_rank=0, node="n",
                                 global_step=number * 2048, update=number, time_ms=number, values=values)  # fmt: skip
        await say(sender, METRICS, sample, uid)
    lines = LogLines(job_uid=uid, namespace="default", attempt_number=1, replica_rank=0, node="n", stream="stdout", time_ms=1, first_line=0,
                     lines=("update 1: mean return 21.4", HOSTILE, "saved checkpoint"))  # fmt: skip
    await say(sender, LOGS, lines, uid)
    progress = {
        "global_step": 245_760,
        "total_steps": 500_000,
        "env_steps_per_s": 8_123.4,
        "mean_return": 187.25,
        "episodes": 1_204,
        "checkpoint_step": 200_000,
    }
    await say(
        sender, STATUS, status_of(view, JobPhase.RUNNING, 3, attempt_number=2, replicas_running=4, nodes=("node-1", "node-2"), progress=progress), uid
    )
    await expect(row).to_contain_text("245,760")
    await expect(panel).to_contain_text("245,760 of 500,000")
    await expect(panel.locator("svg path.curve")).to_have_attribute("d", re.compile("L.*L"))
    await expect(panel.locator("svg line.attempt")).to_have_count(1)
    await expect(panel.get_by_role("log")).to_contain_text(HOSTILE)
    await page.get_by_label("Metric").select_option("value_loss")
    await visit.picture("3-running")
    model = {"name": name, "version": 3}
    done = status_of(view, JobPhase.COMPLETED, 4, attempt_number=2, progress=progress, stop_reason="TargetReturn", model=model)
    await say(sender, STATUS, done, uid)
    await expect(row).to_contain_text(f"{name} v3")
    await expect(panel.get_by_role("button", name="Cancel job")).to_be_disabled()
    await expect(panel).to_contain_text("TargetReturn")
    assert await page.title() == "OpenTinker"


async def test_hostile_text_stays_text(visit: Visit, site: httpx.AsyncClient, sender: AIOKafkaProducer) -> None:
    view = await a_job(site)
    uid = view["metadata"]["uid"]
    hostile = status_of(view, JobPhase.FAILED, 3, reason=HOSTILE, message=HOSTILE, stop_reason=HOSTILE, nodes=("n1",))
    hostile = hostile.model_copy(update={"spec": {"algorithm": HOSTILE, "environment": {"id": HOSTILE}, "hyperparameters": {HOSTILE: HOSTILE}}})
    await say(sender, STATUS, hostile, uid)
    page = visit.page
    await page.goto(f"{site.base_url}/#key={API_KEY}&job={uid}")
    await expect(page.locator("#job .callout")).to_contain_text(HOSTILE)
    await expect(page.locator("#job dl")).to_contain_text(HOSTILE)
    await page.wait_for_timeout(300)
    assert await page.title() == "OpenTinker"
    assert await page.locator("#job img, #rows img, #job script").count() == 0
    await visit.picture("4-hostile")


async def test_cancelling_asks_first(visit: Visit, site: httpx.AsyncClient, sender: AIOKafkaProducer) -> None:
    view = await a_job(site)
    uid, page = view["metadata"]["uid"], visit.page
    await page.goto(f"{site.base_url}/#key={API_KEY}&job={uid}")
    await page.get_by_role("button", name="Cancel job").click()
    await expect(page.get_by_role("dialog")).to_contain_text(f"Cancel {view['metadata']['name']}?")
    await visit.picture("5-confirm")
    await page.get_by_role("button", name="Keep it running").click()
    await expect(page.get_by_role("dialog")).to_be_hidden()
    await page.get_by_role("button", name="Cancel job").click()
    await page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()
    await expect(page.get_by_text("Cancellation accepted.")).to_be_visible()
    await say(sender, STATUS, status_of(view, JobPhase.CANCELLED, 2, reason="Cancelled", message="cancelled by api-key:bootstrap"), uid)
    await expect(page.locator("#job .callout")).to_contain_text("cancelled by api-key:bootstrap")


async def test_it_speaks_chinese(browser: Any, site: httpx.AsyncClient) -> None:
    context = await browser.new_context(viewport={"width": 900, "height": 1100}, locale="zh-CN", color_scheme="dark")
    tab = Visit(await context.new_page())
    await tab.page.goto(f"{site.base_url}/#key={API_KEY}&job={(await a_job(site))['metadata']['uid']}")
    await expect(tab.page.get_by_role("heading", name="任务")).to_be_visible()
    await expect(tab.page.get_by_role("button", name="取消任务")).to_be_visible()
    await tab.page.wait_for_timeout(500)
    await tab.picture("6-chinese-dark")
    await context.close()
    assert tab.faults == []


async def test_filter_search_and_an_unknown_job(visit: Visit, site: httpx.AsyncClient) -> None:
    name = unique("needle")
    await a_job(site, name)
    page = visit.page
    await page.goto(f"{site.base_url}/#key={API_KEY}")
    await page.get_by_label("Find").fill(name)
    await expect(page.locator("#rows tr")).to_have_count(1)
    await page.get_by_label("Find").fill("no job has this name")
    await expect(page.get_by_text("No job matches.")).to_be_visible()
    await page.get_by_label("Find").fill(name)
    await page.get_by_label("Phase").select_option("Completed")
    await expect(page.get_by_text("No job matches.")).to_be_visible()
    await page.goto(f"{site.base_url}/#job={uuid.uuid4()}")
    await expect(page.get_by_text("This job is not known here")).to_be_visible()


@pytest.mark.parametrize("width", [390, 768, 1300, 1920])
async def test_it_fits_narrow_and_wide_screens_with_long_names_and_reasons(
    browser: Any, site: httpx.AsyncClient, sender: AIOKafkaProducer, width: int
) -> None:
    """Nothing is cut off, the header stays one line, and no word of a reason is broken that would fit on a line of its own."""
    name = f"a-long-name-as-people-give-to-sweeps-of-settings-{uuid.uuid4().hex[:14]}"
    view = await a_job(site, name, replicas=4)
    message = "needs 4 × (1 GPU, 2 CPU, 4 GiB); pool default has 3 free GPUs, 6 CPU and 11.5 GiB free on 2 nodes, room for 3 of its 4 replicas"
    await say(sender, STATUS, status_of(view, JobPhase.PENDING, 2, reason="InsufficientCapacity", message=message), view["metadata"]["uid"])
    other = await a_job(site)
    progress = {"global_step": 123_456_789, "total_steps": 500_000_000, "env_steps_per_s": 98_123.4, "mean_return": 12_187.25, "episodes": 1_204_000}
    running_now = status_of(other, JobPhase.RUNNING, 3, attempt_number=2, replicas_running=4, nodes=("node-1", "node-2"), progress=progress)
    await say(sender, STATUS, running_now, other["metadata"]["uid"])
    context = await browser.new_context(viewport={"width": width, "height": 900}, locale="en-GB")
    tab = Visit(await context.new_page())
    for place in ("", f"&job={view['metadata']['uid']}"):
        await tab.page.goto("about:blank")
        await tab.page.goto(f"{site.base_url}/#key={API_KEY}{place}")
        await expect(tab.page.get_by_role("row").filter(has_text=name)).to_contain_text("room for 3 of its 4 replicas")
        await expect(tab.page.get_by_role("row").filter(has_text=other["metadata"]["name"])).to_contain_text("12,187")
        if place:
            await expect(tab.page.locator("#job")).to_contain_text("Why it waits")
        await tab.picture(f"8-width-{width}{'-job' if place else ''}")
        await fits(tab.page, width)
        assert await tab.page.evaluate(_BROKEN_WORDS) == []
    await context.close()
    assert tab.faults == []


async def fits(page: Any, width: int) -> None:
    """Nothing is cut off, and the header is one line."""
    cut = await page.evaluate("[...document.querySelectorAll('html, .scroll')].map((each) => each.scrollWidth - each.clientWidth)")
    assert max(cut) <= 0, f"{cut} px are cut off at {width} px"
    assert await page.evaluate("document.querySelector('header').offsetHeight") < 64


@pytest.mark.parametrize("jobs", [0, 1, 30])
async def test_no_job_one_and_many_fit_every_width(visit: Visit, site: httpx.AsyncClient, jobs: int) -> None:
    """The page as the gateway serves it; the list of jobs is the test's, since other tests' jobs share the topics."""
    view = await a_job(site, replicas=4)
    reason = "needs 4 × (1 GPU, 2 CPU, 4 GiB); pool default has 3 free GPUs on 2 nodes; position 12 of 30, behind 11 of higher priority"
    items = []
    for number in range(jobs):
        phase = ("Pending", "Running", "Failed")[number % 3]
        status = view["status"] | {
            "phase": phase,
            "message": reason,
            "progress": view["status"]["progress"] | {"globalStep": 10**8 + number, "meanReturn": -1234.5},
        }
        metadata = view["metadata"] | {"uid": str(uuid.uuid4()), "name": f"sweep-{number}" + "-of-learning-rates" * (number % 3)}
        items.append(view | {"metadata": metadata, "status": status})
    counts = {phase: sum(each["status"]["phase"] == phase for each in items) for phase in ("Pending", "Running", "Failed")}
    page = visit.page
    await page.route("**/v1/jobs?*", lambda route: route.fulfill(json={"items": items, "cursor": None, "counts": counts}))
    await page.route("**/v1/watch/jobs", lambda route: route.abort())
    await page.goto(f"{site.base_url}/#key={API_KEY}")
    await expect(page.locator("#rows tr")).to_have_count(jobs)
    await expect(page.get_by_text("No jobs yet. Submit one with: opentinker submit")).to_be_visible(visible=jobs == 0)
    for width in (390, 768, 1300, 1920):
        await page.set_viewport_size({"width": width, "height": 900})
        await visit.picture(f"9-jobs-{jobs}-width-{width}")
        await fits(page, width)


# Words of our reason whose first and last letter stand on different lines.
_BROKEN_WORDS = """[...document.querySelectorAll('.why, .callout')].filter((each) => each.textContent.includes('room for 3')).flatMap((element) => {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), found = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode())
    for (const match of node.data.matchAll(/\\S+/g)) {
      const range = document.createRange();
      range.setStart(node, match.index); range.setEnd(node, match.index + match[0].length);
      if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1 && match[0].length < 20) found.push(match[0]);
    }
  return found;
})"""


async def test_lost_contact_is_said_and_mended(browser: Any, stack: Any, api_key_file: Path, database: Any) -> None:
    port = free_port()
    variables = {"OPENTINKER_GATEWAY__PORT": str(port), "OPENTINKER_GATEWAY__API_KEY_FILE": str(api_key_file)}
    context = await browser.new_context(locale="en-GB")
    page = await context.new_page()
    async with running(stack, "opentinker.producers.gateway", port, **variables):
        await page.goto(f"http://127.0.0.1:{port}/#key={API_KEY}")
        await expect(page.locator("#as-of")).to_contain_text("as of")
    await expect(page.get_by_role("alert").filter(has_text="Lost contact")).to_be_visible(timeout=15_000)
    PICTURES.mkdir(parents=True, exist_ok=True)
    await page.screenshot(path=PICTURES / "7-lost.png")
    async with running(stack, "opentinker.producers.gateway", port, **variables):
        await expect(page.get_by_role("alert").filter(has_text="Lost contact")).to_be_hidden(timeout=30_000)
    await context.close()
